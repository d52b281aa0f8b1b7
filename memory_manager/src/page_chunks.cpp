#include "page_chunks.hpp"

#include <algorithm>

namespace muxserve::memory {

PageChunks::PageChunks(const PoolConfig& pool)
    : num_pages_(pool.num_pages),
      pages_(pool.pages_of_a_chunk()),
      states_(static_cast<std::size_t>((pool.num_pages + pages_ - 1) / pages_), State::kBacked),
      left_(states_.size(), 0),
      room_pages_(pool.num_pages),
      backed_pages_(pool.num_pages) {}

std::int64_t PageChunks::pages_of(std::int64_t chunk) const { return std::min(pages_, num_pages_ - first_page(chunk)); }

std::int64_t PageChunks::chunks_for(std::int64_t pages) const {
  return std::clamp<std::int64_t>((pages + pages_ - 1) / pages_, 1, count());
}

void PageChunks::vacate(std::int64_t chunk, std::int64_t left) {
  states_[static_cast<std::size_t>(chunk)] = State::kVacated;
  left_[static_cast<std::size_t>(chunk)] = left;
  ++vacated_;
  room_pages_ -= pages_of(chunk);
}

void PageChunks::become_vacant(std::int64_t chunk) {
  states_[static_cast<std::size_t>(chunk)] = State::kVacant;
  --vacated_;
  ++vacant_;
  backed_pages_ -= pages_of(chunk);
}

void PageChunks::become_backed(std::int64_t chunk) {
  if (state(chunk) == State::kVacated) {
    --vacated_;
  } else {
    --vacant_;
    backed_pages_ += pages_of(chunk);
  }
  states_[static_cast<std::size_t>(chunk)] = State::kBacked;
  room_pages_ += pages_of(chunk);
}

}  // namespace muxserve::memory
