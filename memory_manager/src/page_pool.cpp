#include "page_pool.hpp"

#include <utility>

namespace muxserve::memory {

PagePool::PagePool(PoolConfig config, PoolCounters& counters) : config_(std::move(config)), counters_(counters) {
  // Low ids on top: a pool that is never full never touches its upper pages.
  const auto count = static_cast<std::size_t>(config_.num_pages - 1);
  stack_.resize(count);
  for (std::size_t i = 0; i < count; ++i) stack_[i] = static_cast<std::int32_t>(count - i);
  top_ = static_cast<std::int64_t>(count);
  show();
}

}  // namespace muxserve::memory
