#include "page_pool.hpp"

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

namespace muxserve::memory {

PagePool::PagePool(PoolConfig config, PoolCounters& counters, std::uint32_t index, ChunkMemory* memory)
    : config_(std::move(config)), counters_(counters), index_(index), memory_(memory), chunks_(config_) {
  // Low ids on top: a pool that is never full never touches its upper pages.
  const auto count = static_cast<std::size_t>(config_.num_pages - 1);
  stack_.resize(count);
  for (std::size_t i = 0; i < count; ++i) stack_[i] = static_cast<std::int32_t>(count - i);
  top_ = static_cast<std::int64_t>(count);
  const std::int64_t start = config_.start_pages == 0 ? chunks_.count() : chunks_.chunks_for(config_.start_pages);
  // Of an earlier manager's life there may be memory where this one wants none.
  for (std::int64_t chunk = chunks_.count(); chunk-- > start;) {
    chunks_.vacate(chunk, 0);
    become_vacant(chunk);
  }
  top_ -= config_.num_pages - chunks_.room_pages();
  std::copy(stack_.end() - static_cast<std::ptrdiff_t>(top_), stack_.end(), stack_.begin());
  for (std::int64_t chunk = 0; chunk < start && memory_ != nullptr; ++chunk)
    memory_->take_again(index_, chunks_.first_page(chunk), chunks_.pages_of(chunk));
  show();
}

void PagePool::give_to_chunks(const std::int32_t* row, std::int32_t count) {
  for (const std::int32_t* page = row; page != row + count; ++page) {
    const std::int64_t chunk = chunks_.chunk_of(*page);
    if (chunks_.state(chunk) == PageChunks::State::kBacked)
      stack_[static_cast<std::size_t>(top_++)] = *page;
    else if (chunks_.leave(chunk))
      become_vacant(chunk);
  }
}

bool PagePool::vacates(const std::int32_t* row, std::int32_t count) const {
  if (chunks_.vacated() == 0) return false;
  return std::any_of(row, row + count, [this](std::int32_t page) { return page != 0 && chunks_.is_vacated(page); });
}

void PagePool::become_vacant(std::int64_t chunk) {
  chunks_.become_vacant(chunk);
  if (memory_ != nullptr) memory_->give_back(index_, chunks_.first_page(chunk), chunks_.pages_of(chunk));
}

void PagePool::grow(std::int64_t chunks, const std::vector<PageUse>& uses) {
  for (const auto from : {PageChunks::State::kVacated, PageChunks::State::kVacant}) {
    for (std::int64_t chunk = 0; chunk < chunks_.count() && chunks_.backed() < chunks; ++chunk) {
      if (chunks_.state(chunk) != from) continue;
      const std::int64_t first = chunks_.first_page(chunk), pages = chunks_.pages_of(chunk);
      if (from == PageChunks::State::kVacant && memory_ != nullptr) memory_->take_again(index_, first, pages);
      for (std::int64_t page = first + pages; page-- > first;)
        if (uses[static_cast<std::size_t>(page)] == PageUse::kNone)
          stack_[static_cast<std::size_t>(top_++)] = static_cast<std::int32_t>(page);
      chunks_.become_backed(chunk);
    }
  }
}

void PagePool::shrink(std::int64_t chunks, const std::vector<PageUse>& uses) {
  struct Candidate {
    std::int64_t used = 0, cached = 0, chunk = 0;
  };
  std::vector<Candidate> candidates;
  for (std::int64_t chunk = 1; chunk < chunks_.count(); ++chunk) {
    if (chunks_.state(chunk) != PageChunks::State::kBacked) continue;
    const auto begin = uses.begin() + static_cast<std::ptrdiff_t>(chunks_.first_page(chunk));
    const auto end = begin + static_cast<std::ptrdiff_t>(chunks_.pages_of(chunk));
    candidates.push_back({std::count(begin, end, PageUse::kUsed), std::count(begin, end, PageUse::kCached), chunk});
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& one, const Candidate& other) {
    return std::tie(one.used, one.cached, other.chunk) < std::tie(other.used, other.cached, one.chunk);
  });
  const auto surplus = static_cast<std::size_t>(std::max<std::int64_t>(0, chunks_.backed() - chunks));
  candidates.resize(std::min(candidates.size(), surplus));
  for (const Candidate& each : candidates) chunks_.vacate(each.chunk, each.used + each.cached);
  const auto end = stack_.begin() + static_cast<std::ptrdiff_t>(top_);
  const auto kept = std::remove_if(stack_.begin(), end, [this](std::int32_t page) { return chunks_.is_vacated(page); });
  // Low ids on top again: upper chunks are vacated sooner.
  std::sort(stack_.begin(), kept, std::greater<>());
  top_ = kept - stack_.begin();
  for (const Candidate& each : candidates)
    if (each.used + each.cached == 0) become_vacant(each.chunk);
}

}  // namespace muxserve::memory
