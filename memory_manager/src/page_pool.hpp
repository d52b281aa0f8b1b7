// The free pages of one pool: a stack of page ids.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstring>
#include <vector>

#include "config.hpp"
#include "counters.hpp"
#include "page_chunks.hpp"

namespace muxserve::memory {

// What a page is used for: nothing, a cached block, or a block that is owned or handed off.
enum class PageUse : std::uint8_t { kNone, kCached, kUsed };

// Taking and giving pages is a copy of a range of page ids between the top of the stack and a page-table row, so both
// cost a memcpy of 4 bytes per page. Page 0 is the null page and never on the stack, and neither are pages of chunks
// that are vacated or vacant.
class PagePool {
 public:
  // `memory` (null: nothing is given back) has the pool under the number `index`.
  PagePool(PoolConfig config, PoolCounters& counters, std::uint32_t index = 0, ChunkMemory* memory = nullptr);

  const PoolConfig& config() const { return config_; }
  const PageChunks& chunks() const { return chunks_; }
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
    if (chunks_.vacated() > 0) return give_to_chunks(row, count);
    assert(top_ + count <= static_cast<std::int64_t>(stack_.size()));
    std::memcpy(stack_.data() + top_, row, static_cast<std::size_t>(count) * sizeof(std::int32_t));
    top_ += count;
  }

  // Whether some of the pages of `row` are in chunks that are vacated: they are not to be cached.
  bool vacates(const std::int32_t* row, std::int32_t count) const;

  // Chunks that are vacant or vacated are used again until `chunks` are, those that still have memory first; `uses` has
  // what each page of the pool is used for. Throws std::runtime_error where memory is missing; those before that are
  // used then.
  void grow(std::int64_t chunks, const std::vector<PageUse>& uses);

  // Vacates chunks until `chunks` are left, those with fewest pages in use first. Whoever has cached pages there frees
  // them then.
  void shrink(std::int64_t chunks, const std::vector<PageUse>& uses);

  // The ids on the stack, for checks.
  const std::int32_t* stack() const { return stack_.data(); }

  // Makes the counters that clients see say what is so now.
  void show() {
    store(counters_.free_pages, top_);
    store(counters_.cached_pages, cached_);
    store(counters_.room_pages, chunks_.room_pages());
    store(counters_.backed_pages, chunks_.backed_pages());
  }

 private:
  void give_to_chunks(const std::int32_t* row, std::int32_t count);
  void become_vacant(std::int64_t chunk);

  PoolConfig config_;
  PoolCounters& counters_;
  std::uint32_t index_;
  ChunkMemory* memory_;
  PageChunks chunks_;
  std::vector<std::int32_t> stack_;
  std::int64_t top_ = 0;
  std::int64_t cached_ = 0;
  std::uint64_t stamp_ = 0;
};

}  // namespace muxserve::memory
