// The chunks of a pool: which of them have memory, and which are being vacated so that they need none.
#pragma once

#include <cstdint>
#include <vector>

#include "config.hpp"

namespace muxserve::memory {

// Where the memory of chunks comes from and goes to.
class ChunkMemory {
 public:
  virtual ~ChunkMemory() = default;
  // The pages of a chunk have no memory from now on. None of them is in use.
  virtual void give_back(std::uint32_t pool, std::int64_t first_page, std::int64_t pages) noexcept = 0;
  // They have memory from now on. Throws std::runtime_error with the reason, and then they have none.
  virtual void take_again(std::uint32_t pool, std::int64_t first_page, std::int64_t pages) = 0;
};

// A chunk is a run of pages whose memory is given back and taken together. It is BACKED; VACATED, when its free pages
// are handed out no more and it waits for those that are in use; or VACANT: none of its pages is in use, and it has no
// memory. The first chunk has the null page and stays.
class PageChunks {
 public:
  enum class State : std::uint8_t { kBacked, kVacated, kVacant };

  explicit PageChunks(const PoolConfig& pool);

  std::int64_t count() const { return static_cast<std::int64_t>(states_.size()); }
  std::int64_t chunk_of(std::int32_t page) const { return page / pages_; }
  std::int64_t first_page(std::int64_t chunk) const { return chunk * pages_; }
  std::int64_t pages_of(std::int64_t chunk) const;
  State state(std::int64_t chunk) const { return states_[static_cast<std::size_t>(chunk)]; }
  // Pages of a vacated chunk that are still in use.
  std::int64_t left(std::int64_t chunk) const { return left_[static_cast<std::size_t>(chunk)]; }
  // As few chunks as have `pages` pages, at least one.
  std::int64_t chunks_for(std::int64_t pages) const;
  std::int64_t backed() const { return count() - vacated_ - vacant_; }
  std::int64_t vacated() const { return vacated_; }
  // Whether its pages are not to be handed out.
  bool is_vacated(std::int32_t page) const { return state(chunk_of(page)) != State::kBacked; }

  void vacate(std::int64_t chunk, std::int64_t left);
  // A page of a vacated chunk is in use no more; true: it was the last one.
  bool leave(std::int64_t chunk) { return --left_[static_cast<std::size_t>(chunk)] == 0; }
  void become_vacant(std::int64_t chunk);
  void become_backed(std::int64_t chunk);

  // Pages of all chunks but the vacated and vacant ones, and of all but the vacant ones.
  std::int64_t room_pages() const { return room_pages_; }
  std::int64_t backed_pages() const { return backed_pages_; }

 private:
  std::int64_t num_pages_;
  std::int64_t pages_;  // of a chunk; the last one may have fewer
  std::vector<State> states_;
  std::vector<std::int64_t> left_;
  std::int64_t vacated_ = 0;
  std::int64_t vacant_ = 0;
  std::int64_t room_pages_;
  std::int64_t backed_pages_;
};

}  // namespace muxserve::memory
