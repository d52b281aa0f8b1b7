// The memory of a page pool, behind an interface: POSIX shared memory, or device memory where there is a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "descriptors.hpp"

namespace muxserve::memory {

// What clients map the pools by: handles by pool and rank.
using PoolHandles = std::vector<std::vector<std::string>>;

// One allocation of a whole pool, on one rank. The manager never reads or writes it; it only keeps it alive and tells
// clients how to map it.
class PoolMemory {
 public:
  virtual ~PoolMemory() = default;

  // What a client needs to map the pool: "posix:<segment name>". Another kind of memory has another scheme.
  virtual std::string handle() const = 0;

  // A descriptor by which a client maps it, or that chunk of it, if the handle alone is not enough; else none. Other
  // threads may ask.
  virtual Descriptor descriptor(std::size_t chunk) const {
    static_cast<void>(chunk);
    return {};
  }

  // Gives the memory of a chunk back, if it has any, whose addresses stay. Nobody uses it.
  virtual void give_back(std::size_t offset, std::size_t bytes) noexcept = 0;

  // Has memory in that chunk. Throws std::runtime_error with the reason, and then nothing has changed.
  virtual void take_again(std::size_t offset, std::size_t bytes) = 0;

  // Gives the memory back. Clients that have it mapped keep their mapping.
  virtual void destroy() = 0;
};

}  // namespace muxserve::memory
