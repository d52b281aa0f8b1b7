// Requests as a client may send them: most of them good ones, so that something happens, and the others wrong in every
// way. Everything follows from the seed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "protocol.hpp"
#include "support.hpp"

namespace muxserve::memory::testing {

// Runs `body(seed)` for seeds 1 to `count`; with MUXSERVE_FUZZ_SECONDS, for so long, from a seed that follows from the
// time; with MUXSERVE_FUZZ_SEED, for that one. The seed stands in every failure.
inline void for_each_seed(std::uint32_t count, const std::function<void(std::uint32_t)>& body) {
  using Clock = std::chrono::steady_clock;
  const char* only = std::getenv("MUXSERVE_FUZZ_SEED");
  const char* seconds = std::getenv("MUXSERVE_FUZZ_SECONDS");
  const auto run = [&](std::uint32_t seed) {
    SCOPED_TRACE("to run this again: MUXSERVE_FUZZ_SEED=" + std::to_string(seed));
    body(seed);
    return !::testing::Test::HasFailure();
  };
  if (only != nullptr) {
    run(static_cast<std::uint32_t>(std::strtoul(only, nullptr, 10)));
  } else if (seconds != nullptr) {
    const auto end = Clock::now() + std::chrono::seconds(std::atoi(seconds));
    for (auto seed = static_cast<std::uint32_t>(std::time(nullptr)) * 1000; Clock::now() < end; ++seed)
      if (!run(seed)) return;
  } else {
    for (std::uint32_t seed = 1; seed <= count; ++seed)
      if (!run(seed)) return;
  }
}

class FrameFuzzer {
 public:
  explicit FrameFuzzer(std::uint32_t seed) : random_(seed) {}

  std::uint32_t pick(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }
  bool one_in(std::uint32_t n) { return pick(n) == 0; }

  // Blocks that the client probably holds; the caller keeps it up to date, or does not.
  std::vector<std::int32_t> held;
  std::uint64_t generation = 7;
  bool greeted = false;

  // One frame: header and payload. `operation` is what it asks for.
  Bytes frame(Operation& operation) {
    operation = choose();
    Header header;
    header.operation = static_cast<std::uint16_t>(operation);
    header.generation = operation == Operation::kHello ? 0 : generation;
    header.sequence = ++sequence_;
    if (one_in(100)) header.generation = random_();
    if (one_in(100)) header.operation = static_cast<std::uint16_t>(random_());
    if (one_in(20)) header.core = pick(8);
    Bytes out;
    FrameWriter frame(out, header);
    write(frame, operation);
    frame.finish();
    if (one_in(12)) spoil(out);
    return out;
  }

  // Changes bytes of the payload, or its length; the frame stays one that can be read.
  void spoil(Bytes& out) {
    if (out.size() > sizeof(Header) && one_in(2)) {
      for (std::uint32_t i = 0; i <= pick(4); ++i)
        out[sizeof(Header) + pick(static_cast<std::uint32_t>(out.size() - sizeof(Header)))] =
            static_cast<std::uint8_t>(random_());
    } else {
      const std::size_t size = sizeof(Header) + 4 * pick(40);
      out.resize(size, static_cast<std::uint8_t>(random_()));
    }
    const auto length = static_cast<std::uint32_t>(out.size() - sizeof(Header));
    std::memcpy(out.data() + offsetof(Header, length), &length, sizeof length);
  }

  ModelConfig model_config() {
    ModelConfig config{one_in(5) ? text() : "m" + std::to_string(pick(5)),
                       one_in(8) ? text() : "p",
                       number(),
                       number(),
                       number(),
                       one_in(3) ? number() : 0};
    if (!one_in(4)) return config;
    for (std::uint32_t i = 0, n = one_in(30) ? 2000 : pick(3); i < n; ++i)
      config.windowed_layers.push_back(one_in(4) ? number() : i);
    config.window_blocks = number();
    return config;
  }

  Config config() {
    Config made;
    made.prefix = one_in(8) ? text() : "muxserve-test";
    made.ranks = one_in(8) ? number() : 1;
    if (one_in(4)) {
      made.device = one_in(4) ? text() : "cuda";
      made.ipc = one_in(4) ? text() : "vmm";
      for (std::int64_t i = 0; i < std::min<std::int64_t>(made.ranks, 3); ++i) made.devices.push_back("GPU-" + text());
    }
    for (std::uint32_t i = 0, n = one_in(50) ? 70 : 1 + pick(2); i < n; ++i)
      made.pools.push_back({one_in(8) ? text()
                            : i == 0  ? "p"
                                      : "q",
                            one_in(8) ? number() : 64, one_in(8) ? number() : 100 + pick(9)});
    for (std::uint32_t i = 0, n = pick(3); i < n; ++i) made.models.push_back(model_config());
    return made;
  }

 private:
  Operation choose() {
    if (!greeted && !one_in(5)) return Operation::kHello;
    static constexpr Operation kOften[] = {
        Operation::kStep,  Operation::kStep,    Operation::kStep,    Operation::kStep,    Operation::kPost,
        Operation::kPost,  Operation::kHandOff, Operation::kHandOff, Operation::kHandOff, Operation::kHandOff,
        Operation::kAdopt, Operation::kAdopt,   Operation::kDrop};
    static constexpr Operation kSeldom[] = {Operation::kHello,      Operation::kSetQuotas, Operation::kStatistics,
                                            Operation::kResetCache, Operation::kAddModel,  Operation::kRemoveModel,
                                            Operation::kDescribe,   Operation::kSetRoom};
    return one_in(6) ? kSeldom[pick(8)] : kOften[pick(13)];
  }

  std::uint32_t model() { return one_in(30) ? static_cast<std::uint32_t>(random_()) : one_in(10) ? pick(6) : pick(2); }

  std::uint32_t count(std::uint32_t small) {
    static constexpr std::uint32_t kHuge[] = {0xFFFFFFFFu, 0x80000000u, 0x7FFFFFFFu, 1u << 20, 0x40000000u, 100'000u};
    return one_in(60) ? kHuge[pick(6)] : pick(small);
  }

  std::vector<std::int32_t> blocks(std::uint32_t most) {
    std::vector<std::int32_t> ids;
    const std::uint32_t wanted = pick(most + 1);
    for (std::uint32_t i = 0; i < wanted; ++i) {
      if (!held.empty() && !one_in(25))
        ids.push_back(held[pick(static_cast<std::uint32_t>(held.size()))]);
      else
        ids.push_back(one_in(3) ? static_cast<std::int32_t>(random_()) : static_cast<std::int32_t>(pick(45)));
    }
    if (!one_in(8)) {
      std::sort(ids.begin(), ids.end());
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    }
    return ids;
  }

  // They are probably not held any more.
  void let_go(const std::vector<std::int32_t>& ids) {
    const auto gone = [&](std::int32_t id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); };
    if (!one_in(10)) held.erase(std::remove_if(held.begin(), held.end(), gone), held.end());
  }

  std::vector<Hash> hashes(std::size_t n) {
    std::vector<Hash> result;
    for (std::size_t i = 0; i < n; ++i) result.push_back(hash_of(pick(40)));
    return result;
  }

  std::string text() {
    static const std::string kTexts[] = {"",
                                         "a",
                                         "b",
                                         "key",
                                         std::string(128, 'k'),
                                         std::string(129, 'k'),
                                         "\xFF\xFE",
                                         "caf\xC3\xA9",
                                         std::string("z\0", 2),
                                         "\xED\xA0\x80",
                                         "line\nline",
                                         "\"quoted\\",
                                         std::string(5000, 'x')};
    return one_in(4) ? kTexts[pick(13)] : std::to_string(pick(12));
  }

  std::int64_t number() {
    static constexpr std::int64_t kNumbers[] = {1'048'576, -1, kNever, 1'000'000'000, 0, -kNever - 1};
    return one_in(6) ? kNumbers[pick(6)] : 1 + pick(8);
  }

  void write(FrameWriter& frame, Operation operation) {
    switch (operation) {
      case Operation::kHello:
        frame.text(one_in(4) ? text() : "fuzzer").u32(pick(100'000));
        break;
      case Operation::kStep:
      case Operation::kPost: {
        const bool step = operation == Operation::kStep || one_in(20);
        const auto release = blocks(3), publish = blocks(4);
        let_go(release);
        std::vector<std::uint32_t> lengths;
        std::size_t sum = 0;
        for (std::uint32_t i = 0; step && i < pick(4); ++i) sum += lengths.emplace_back(pick(6));
        if (!lengths.empty() && one_in(40)) lengths.back() = count(10);
        frame.u32(model()).u32(one_in(3) ? 1 : one_in(50) ? pick(100) : 0).u32(step ? count(8) : 0);
        frame.u32(one_in(60) ? count(9) : static_cast<std::uint32_t>(release.size()));
        frame.u32(one_in(60) ? count(9) : static_cast<std::uint32_t>(publish.size()));
        frame.u32(one_in(60) ? count(9) : static_cast<std::uint32_t>(lengths.size()));
        frame.array(Span<std::int32_t>(release)).array(Span<std::int32_t>(publish)).array(Span<std::uint32_t>(lengths));
        frame.array(Span<Hash>(hashes(publish.size()))).array(Span<Hash>(hashes(sum)));
        break;
      }
      case Operation::kHandOff: {
        const auto handed = blocks(2);
        const auto release = one_in(3) ? handed : blocks(1);
        let_go(release);
        static constexpr std::int64_t kTimes[] = {1, 1'000'000, -5, 0, kNever, kNever / 4, 50};
        frame.u32(model()).i64(one_in(4) ? kTimes[pick(7)] : 10'000 + pick(10'000));
        frame.u32(one_in(60) ? count(9) : static_cast<std::uint32_t>(handed.size()));
        frame.u32(one_in(60) ? count(9) : static_cast<std::uint32_t>(release.size()));
        frame.text(text()).array(Span<std::int32_t>(handed)).array(Span<std::int32_t>(release));
        break;
      }
      case Operation::kAdopt:
      case Operation::kDrop:
        frame.u32(model()).text(text());
        break;
      case Operation::kSetQuotas: {
        const std::uint32_t n = pick(4);
        frame.u32(one_in(20) ? count(9) : n);
        for (std::uint32_t i = 0; i < n; ++i)
          frame.u32(model()).i64(one_in(10) ? static_cast<std::int64_t>(random_()) : pick(102));
        break;
      }
      case Operation::kSetRoom:
        frame.u32(one_in(20) ? count(3) : 0).i64(one_in(10) ? static_cast<std::int64_t>(random_()) : 1 + pick(110));
        break;
      case Operation::kResetCache:
      case Operation::kRemoveModel:
        // Models that were added; once in a while one of the first two goes, and takes half of the game with it.
        frame.u32(operation == Operation::kResetCache || one_in(150) ? model() : 2 + pick(20));
        break;
      case Operation::kAddModel:
        write_model(frame, model_config());
        break;
      case Operation::kStatistics:
      case Operation::kDescribe:
        break;
    }
  }

  std::mt19937_64 random_;
  std::uint32_t sequence_ = 0;
};

}  // namespace muxserve::memory::testing
