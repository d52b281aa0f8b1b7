#include "protocol.hpp"

#include <sched.h>

namespace muxserve::memory {

std::uint32_t this_core() {
  const int core = sched_getcpu();
  return core < 0 ? 0 : static_cast<std::uint32_t>(core) + 1;
}

void Reader::too_short() { throw Refused(Code::kMalformed, "the payload ends too early; nothing was done"); }

void Reader::end() const {
  if (left_ != 0) throw Refused(Code::kMalformed, "the payload is too long; nothing was done");
}

std::string Reader::text() {
  const std::uint32_t size = u32();
  const std::uint64_t padded = (std::uint64_t{size} + 3) / 4 * 4;
  if (padded > left_) too_short();
  std::string value(reinterpret_cast<const char*>(at_), size);
  skip(static_cast<std::size_t>(padded));
  return value;
}

FrameWriter::FrameWriter(Bytes& out, const Header& header) : out_(out), begin_(out.size()) {
  raw(&header, sizeof header);
}

FrameWriter& FrameWriter::raw(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  if (size != 0) out_.insert(out_.end(), bytes, bytes + size);
  return *this;
}

FrameWriter& FrameWriter::text(const std::string& value) {
  static constexpr std::uint8_t kZeros[4] = {};
  u32(static_cast<std::uint32_t>(value.size()));
  raw(value.data(), value.size());
  return raw(kZeros, (4 - value.size() % 4) % 4);
}

void FrameWriter::finish() {
  const auto length = static_cast<std::uint32_t>(out_.size() - begin_ - sizeof(Header));
  std::memcpy(out_.data() + begin_ + offsetof(Header, length), &length, sizeof length);
}

StepRequest read_step(Reader& reader) {
  StepRequest request;
  request.model = reader.u32();
  const std::uint32_t flags = reader.u32();
  if ((flags & ~kPartial) != 0) throw Refused(Code::kMalformed, "unknown flags; nothing was done");
  request.partial = (flags & kPartial) != 0;
  request.reserve = reader.u32();
  const std::uint32_t releases = reader.u32();
  const std::uint32_t publishes = reader.u32();
  const std::uint32_t lookups = reader.u32();
  request.release = reader.array<std::int32_t>(releases);
  request.publish = reader.array<std::int32_t>(publishes);
  request.lookup_lengths = reader.array<std::uint32_t>(lookups);
  request.publish_hashes = reader.array<Hash>(publishes);
  std::uint64_t hashes = 0;  // cannot overflow: at most kMaxPayload / 4 lengths of 32 bits
  for (const std::uint32_t length : request.lookup_lengths) hashes += length;
  request.lookup_hashes = reader.array<Hash>(hashes);
  reader.end();
  return request;
}

}  // namespace muxserve::memory
