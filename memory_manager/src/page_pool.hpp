// The free pages of one pool: a stack of page ids.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstring>
#include <vector>

#include "config.hpp"
#include "counters.hpp"

namespace muxserve::memory {

// Taking and giving pages is a copy of a range of page ids between the top of the stack and a page-table row, so both
// cost a memcpy of 4 bytes per page. Page 0 is the null page and never on the stack.
class PagePool {
 public:
  PagePool(PoolConfig config, PoolCounters& counters);

  const PoolConfig& config() const { return config_; }
  std::int64_t free_pages() const { return top_; }
  std::int64_t cached_pages() const { return cached_; }
  void add_cached(std::int64_t pages) { cached_ += pages; }

  // Orders the cached blocks of all models of the pool by age.
  std::uint64_t next_stamp() { return ++stamp_; }

  // Moves the topmost `count` page ids into `row`. The caller has checked that there are so many.
  void take(std::int32_t* row, std::int32_t count) {
    assert(count <= top_);
    top_ -= count;
    std::memcpy(row, stack_.data() + top_, static_cast<std::size_t>(count) * sizeof(std::int32_t));
  }

  // Puts the `count` page ids of `row` back on top.
  void give(const std::int32_t* row, std::int32_t count) {
    assert(top_ + count <= static_cast<std::int64_t>(stack_.size()));
    std::memcpy(stack_.data() + top_, row, static_cast<std::size_t>(count) * sizeof(std::int32_t));
    top_ += count;
  }

  // The ids on the stack, for checks.
  const std::int32_t* stack() const { return stack_.data(); }

  // Makes the counters that clients see say what is so now.
  void show() {
    store(counters_.free_pages, top_);
    store(counters_.cached_pages, cached_);
  }

 private:
  PoolConfig config_;
  PoolCounters& counters_;
  std::vector<std::int32_t> stack_;
  std::int64_t top_ = 0;
  std::int64_t cached_ = 0;
  std::uint64_t stamp_ = 0;
};

}  // namespace muxserve::memory
