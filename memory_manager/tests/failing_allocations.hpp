// Memory that runs out when a test says so.
#pragma once

namespace muxserve::memory::testing {

// While this object lives, the allocation of the calling thread after `count` more ones throws std::bad_alloc, once.
class FailingAllocation {
 public:
  explicit FailingAllocation(int count);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  // Whether it has come to that.
  bool happened() const;
};

}  // namespace muxserve::memory::testing
