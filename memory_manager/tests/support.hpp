// What the tests share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "manager.hpp"
#include "segments.hpp"

namespace muxserve::memory::testing {

// The code of the refusal that `action` meets, kOk if it meets none.
inline Code refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Refused& refused) {
    return refused.code();
  }
  return Code::kOk;
}

inline Hash hash_of(std::uint32_t number) {
  Hash hash{};
  for (std::size_t i = 0; i < 4; ++i) hash[i] = static_cast<std::uint8_t>(number >> (8 * i));
  return hash;
}

inline std::vector<Hash> hashes_of(const std::vector<std::uint32_t>& numbers) {
  std::vector<Hash> hashes;
  for (const std::uint32_t number : numbers) hashes.push_back(hash_of(number));
  return hashes;
}

// Model "a": 2 layers * 3 heads, model "b": 1 * 2, both in pool "p" of 101 pages (100 without the null page).
inline Config small_config() {
  Config config;
  config.prefix = "muxserve-test";
  config.pools = {{"p", 64, 101}};
  config.models = {{"a", "p", 2, 3, 20, 60}, {"b", "p", 1, 2, 40, 40}};
  return config;
}

constexpr std::uint32_t kA = 0;
constexpr std::uint32_t kB = 1;

// A manager on the heap with short forms of its operations.
struct Fixture {
  explicit Fixture(Config config = small_config(), ChunkMemory* memory = nullptr)
      : manager(std::move(config), segments, 7, {}, 0, memory) {}

  StepReply step(int client, std::uint32_t model, const std::vector<std::int32_t>& release, std::uint32_t reserve,
                 bool partial = false) {
    StepRequest request;
    request.model = model;
    request.release = release;
    request.reserve = reserve;
    request.partial = partial;
    StepReply reply;
    manager.step(client, request, reply);
    return reply;
  }

  std::vector<std::int32_t> reserve(int client, std::uint32_t model, std::uint32_t count, bool partial = false) {
    return step(client, model, {}, count, partial).reserved;
  }

  void release(int client, std::uint32_t model, const std::vector<std::int32_t>& blocks) {
    step(client, model, blocks, 0);
  }

  void publish(int client, std::uint32_t model, const std::vector<std::int32_t>& blocks,
               const std::vector<std::uint32_t>& numbers, const std::vector<std::int32_t>& release = {}) {
    const std::vector<Hash> hashes = hashes_of(numbers);
    StepRequest request;
    request.model = model;
    request.publish = blocks;
    request.publish_hashes = hashes;
    request.release = release;
    StepReply reply;
    manager.step(client, request, reply);
  }

  std::vector<std::int32_t> look_up(int client, std::uint32_t model, const std::vector<std::uint32_t>& numbers) {
    const std::vector<Hash> hashes = hashes_of(numbers);
    const std::vector<std::uint32_t> lengths{static_cast<std::uint32_t>(hashes.size())};
    StepRequest request;
    request.model = model;
    request.lookup_lengths = lengths;
    request.lookup_hashes = hashes;
    StepReply reply;
    manager.step(client, request, reply);
    return reply.hits;
  }

  std::int64_t free_pages() { return load(segments.counters().pools[0].free_pages); }
  std::int64_t pool_cached() { return load(segments.counters().pools[0].cached_pages); }
  std::int64_t used(std::uint32_t model) { return load(segments.counters().models[model].used_pages); }
  std::int64_t cached(std::uint32_t model) { return load(segments.counters().models[model].cached_pages); }
  std::int64_t quota(std::uint32_t model) { return load(segments.counters().models[model].quota_pages); }
  ModelStatistics statistics(std::uint32_t model) { return manager.model(model).statistics(); }

  HeapSegments segments;
  Manager manager;
};

}  // namespace muxserve::memory::testing
