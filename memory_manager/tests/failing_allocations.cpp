#include "failing_allocations.hpp"

#include <cstdlib>
#include <new>

namespace {

thread_local int left = -1;  // -1: no allocation is to fail

}  // namespace

void* operator new(std::size_t size) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace muxserve::memory::testing {

FailingAllocation::FailingAllocation(int count) { left = count; }
FailingAllocation::~FailingAllocation() { left = -1; }
bool FailingAllocation::happened() const { return left < 0; }

}  // namespace muxserve::memory::testing
