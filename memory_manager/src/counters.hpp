// The shared memory segment of live counters. Clients read it without a lock or a system call.
//
// The layout is part of the contract with the clients: append only. Every field is an aligned 64-bit atomic accessed
// with relaxed ordering; several fields read one after another need not belong to the same moment.
#pragma once

#include <atomic>
#include <cstdint>

#include "config.hpp"

namespace muxserve::memory {

using Counter = std::atomic<std::int64_t>;
static_assert(Counter::is_always_lock_free && sizeof(Counter) == 8, "counters are shared between processes");

// All zero bytes is a valid state of each of these, so a fresh segment needs no construction.
struct alignas(64) PoolCounters {
  Counter free_pages;
  Counter cached_pages;
  Counter room_pages;    // that may be handed out or are: all but those of chunks that are vacated
  Counter backed_pages;  // that have memory: the same, and those of chunks that are not vacant yet
};

struct alignas(64) ModelCounters {
  Counter used_pages;  // owned + handed off
  Counter cached_pages;
  Counter quota_pages;
};

struct Counters {
  alignas(64) std::atomic<std::uint64_t> generation;  // 0: no manager lives behind this segment any more
  PoolCounters pools[kMaxPools];
  ModelCounters models[kMaxModels];
};

static_assert(sizeof(PoolCounters) == 64 && sizeof(ModelCounters) == 64, "one cache line each");

inline void store(Counter& counter, std::int64_t value) { counter.store(value, std::memory_order_relaxed); }
inline std::int64_t load(const Counter& counter) { return counter.load(std::memory_order_relaxed); }

}  // namespace muxserve::memory
