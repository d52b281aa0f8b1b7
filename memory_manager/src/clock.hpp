// The one clock of the server and its clients.
#pragma once

#include <chrono>
#include <cstdint>

namespace muxserve::memory {

// Nanoseconds of a monotonic clock.
inline std::int64_t clock_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace muxserve::memory
