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

ModelConfig read_model(Reader& reader) {
  ModelConfig model;
  model.name = reader.text();
  model.pool = reader.text();
  model.layers = reader.i64();
  model.kv_heads = reader.i64();
  model.num_blocks = reader.i64();
  model.quota_pages = reader.i64();
  model.window_blocks = reader.i64();
  const std::uint32_t windowed = reader.u32();
  for (std::uint32_t i = 0; i < windowed; ++i) model.windowed_layers.push_back(reader.i64());
  return model;
}

FrameWriter& write_model(FrameWriter& frame, const ModelConfig& model) {
  frame.text(model.name).text(model.pool).i64(model.layers).i64(model.kv_heads).i64(model.num_blocks);
  frame.i64(model.quota_pages).i64(model.window_blocks).u32(static_cast<std::uint32_t>(model.windowed_layers.size()));
  for (const std::int64_t layer : model.windowed_layers) frame.i64(layer);
  return frame;
}

Bytes encode_config(const Config& config) {
  Header header;
  header.operation = static_cast<std::uint16_t>(Operation::kConfiguration);
  Bytes file;
  FrameWriter frame(file, header);
  frame.text(config.prefix).i64(config.ranks).text(config.device).text(config.ipc);
  frame.u32(static_cast<std::uint32_t>(config.devices.size())).u32(static_cast<std::uint32_t>(config.pools.size()));
  frame.u32(static_cast<std::uint32_t>(config.models.size()));
  for (const std::string& device : config.devices) frame.text(device);
  for (const PoolConfig& pool : config.pools) {
    frame.text(pool.name).i64(pool.page_bytes).i64(pool.num_pages).i64(pool.chunk_bytes).i64(pool.start_pages);
  }
  for (const ModelConfig& model : config.models) write_model(frame, model);
  frame.finish();
  return file;
}

Config decode_config(Span<std::uint8_t> file) {
  Header header;
  if (file.size() < sizeof header) throw ConfigError("this is no configuration: it is too short");
  std::memcpy(&header, file.data(), sizeof header);
  if (header.magic != kMagic || header.operation != static_cast<std::uint16_t>(Operation::kConfiguration))
    throw ConfigError("this is no configuration of a memory manager");
  if (header.version != kVersion) {
    throw ConfigError("the configuration has version " + std::to_string(header.version) +
                      " of the protocol's encoding, the manager reads version " + std::to_string(kVersion) +
                      "; install the same muxserve on both sides");
  }
  if (header.length != file.size() - sizeof header) {
    throw ConfigError("the configuration has " + std::to_string(file.size() - sizeof header) +
                      " bytes behind its header, not the " + std::to_string(header.length) + " that it announces");
  }
  Reader reader(file.data() + sizeof header, header.length);
  Config config;
  try {
    config.prefix = reader.text();
    config.ranks = reader.i64();
    config.device = reader.text();
    config.ipc = reader.text();
    const std::uint32_t devices = reader.u32(), pools = reader.u32(), models = reader.u32();
    for (std::uint32_t i = 0; i < devices; ++i) config.devices.push_back(reader.text());
    for (std::uint32_t i = 0; i < pools; ++i) {
      PoolConfig pool;
      pool.name = reader.text();
      pool.page_bytes = reader.i64();
      pool.num_pages = reader.i64();
      pool.chunk_bytes = reader.i64();
      pool.start_pages = reader.i64();
      config.pools.push_back(pool);
    }
    for (std::uint32_t i = 0; i < models; ++i) config.models.push_back(read_model(reader));
    reader.end();
  } catch (const Refused& refused) {
    throw ConfigError(std::string("the configuration does not parse: ") + refused.what());
  }
  return config;
}

}  // namespace muxserve::memory
