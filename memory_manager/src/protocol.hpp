// The framed binary protocol between the manager and its clients.
//
// A frame is a 32-byte header and a payload of at most kMaxPayload bytes, a multiple of 4 long so that every frame in
// a stream stays aligned. All numbers are little-endian. A request is answered by one frame with the same sequence
// number and operation | kReply; `status` is a Code, and unless it is kOk the payload is a text for people. POST has
// no answer unless it is refused.
//
// Payloads, in order (u32 and i64 numbers; texts are a u32 length and the bytes, padded to 4 with zeros):
//   HELLO        text name, u32 pid             -> u32 client id, text description (JSON)
//   STEP, POST   u32 model, u32 flags (1 = partial), u32 reserve, u32 releases, u32 publishes, u32 lookups,
//                i32 release[releases], i32 publish[publishes], u32 length[lookups],
//                32-byte hash[publishes], 32-byte hash[sum of length]
//                                               -> u32 lookups, u32 reserved, u32 hits[lookups],
//                                                  i32 hit blocks[sum of hits], i32 reserved blocks[reserved]
//   HAND_OFF     u32 model, i64 ttl in ns, u32 blocks, u32 releases, text key, i32 block[blocks], i32 release[releases]
//   ADOPT        u32 model, text key            -> u32 blocks, i32 block[blocks]
//   DROP         u32 model, text key
//   SET_QUOTAS   u32 count, count * (u32 model, i64 pages)
//   STATISTICS                                  -> text JSON
//   RESET_CACHE  u32 model
//   ADD_MODEL    model                          -> u32 index
//   REMOVE_MODEL u32 model
//   DESCRIBE                                    -> text JSON
//   LEAVE_WINDOW u32 model, u32 blocks, i32 block[blocks]
//   SET_ROOM     u32 pool, i64 pages
// A model is
//   text name, text pool, i64 layers, i64 kv_heads, i64 num_blocks, i64 quota_pages, i64 window_blocks, u32 windowed,
//   i64 windowed_layer[windowed]
//
// The manager's configuration is a file with one frame, CONFIGURATION, which no connection may send:
//   text prefix, i64 ranks, text device, text ipc, u32 devices, u32 pools, u32 models, text device[devices],
//   pools * (text name, i64 page_bytes, i64 num_pages, i64 chunk_bytes, i64 start_pages), model[models]
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "errors.hpp"
#include "limits.hpp"
#include "manager.hpp"
#include "span.hpp"

namespace muxserve::memory {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the protocol is little-endian and copies numbers as they are");

constexpr std::uint32_t kMagic = 0x4D4D584D;  // "MXMM"
constexpr std::uint16_t kVersion = 2;
constexpr std::uint16_t kReply = 0x8000;
constexpr std::uint32_t kPartial = 1;

enum class Operation : std::uint16_t {
  kHello = 1,
  kStep = 2,
  kPost = 3,
  kHandOff = 4,
  kAdopt = 5,
  kDrop = 6,
  kSetQuotas = 7,
  kStatistics = 8,
  kResetCache = 9,
  kAddModel = 10,
  kRemoveModel = 11,
  kDescribe = 12,
  kLeaveWindow = 13,
  kConfiguration = 14,  // in a file only
  kSetRoom = 15,
};

struct Header {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t operation = 0;
  std::uint64_t generation = 0;
  std::uint32_t sequence = 0;
  std::uint32_t length = 0;  // of the payload
  std::uint32_t status = 0;  // a Code, in replies
  std::uint32_t core = 0;    // 1 + the processor core that the sender runs on, 0 if unknown: see AdaptiveSpin
};
static_assert(sizeof(Header) == 32);

// What to put into Header::core.
std::uint32_t this_core();

// Reads a payload. Every method throws Refused(kMalformed) where the payload is too short.
class Reader {
 public:
  Reader(const std::uint8_t* data, std::size_t size) : at_(data), left_(size) {}

  std::uint32_t u32() { return number<std::uint32_t>(); }
  std::int64_t i64() { return number<std::int64_t>(); }
  std::string text();

  // A view into the payload, which is 4-byte aligned.
  template <class T>
  Span<T> array(std::uint64_t count) {
    static_assert(alignof(T) <= 4);
    if (count > left_ / sizeof(T)) too_short();
    const auto* data = reinterpret_cast<const T*>(at_);
    skip(static_cast<std::size_t>(count) * sizeof(T));
    return Span<T>(data, static_cast<std::size_t>(count));
  }

  // Refuses a payload of which something is left.
  void end() const;

 private:
  template <class T>
  T number() {
    if (left_ < sizeof(T)) too_short();
    T value;
    std::memcpy(&value, at_, sizeof(T));
    skip(sizeof(T));
    return value;
  }
  void skip(std::size_t bytes) {
    at_ += bytes;
    left_ -= bytes;
  }
  [[noreturn]] static void too_short();

  const std::uint8_t* at_;
  std::size_t left_;
};

// A growing run of bytes that keeps its memory from use to use.
using Bytes = std::vector<std::uint8_t>;

// Appends one frame to a Bytes; finish() fills the length in.
class FrameWriter {
 public:
  FrameWriter(Bytes& out, const Header& header);

  FrameWriter& u32(std::uint32_t value) { return raw(&value, sizeof value); }
  FrameWriter& i64(std::int64_t value) { return raw(&value, sizeof value); }
  FrameWriter& text(const std::string& value);
  FrameWriter& raw(const void* data, std::size_t size);

  template <class T>
  FrameWriter& array(Span<T> values) {
    return raw(values.data(), values.size() * sizeof(T));
  }

  void finish();

 private:
  Bytes& out_;
  std::size_t begin_;
};

// The views point into the payload.
StepRequest read_step(Reader& reader);

// A model as it is written; check_model() checks its values.
ModelConfig read_model(Reader& reader);
FrameWriter& write_model(FrameWriter& frame, const ModelConfig& model);

// The configuration as a file has it. Decoding checks the encoding alone and throws ConfigError; check_config() checks
// the values.
Bytes encode_config(const Config& config);
Config decode_config(Span<std::uint8_t> file);

}  // namespace muxserve::memory
