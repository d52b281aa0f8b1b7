// Looking for a message for a moment before sleeping, but only where that pays.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol.hpp"

namespace muxserve::memory {

// Waking a thread that sleeps on another core costs tens of microseconds, more than most requests. Looking for the
// message instead pays if the other side runs on another core at that moment. On the same core it only keeps the other
// side from running, so messages say where their sender runs. And looking is given up for a growing number of times
// while it finds nothing, and resumed when it does.
class AdaptiveSpin {
 public:
  // Whether to look this time, the other side having run on that core (as in Header::core) when it sent its last
  // message. If so, found() must be told how it went.
  bool worth_it(std::uint32_t other_core) {
    if (other_core == this_core()) return false;
    if (skip_ == 0) return true;
    --skip_;
    return false;
  }

  void found(bool it) {
    if (it) {
      misses_ = 0;
      pause_ = kFirstPause;
    } else if (++misses_ >= kMisses) {
      skip_ = pause_;
      pause_ = std::min(2 * pause_, kLongestPause);
    }
  }

 private:
  // A single miss says little: one of the two was preempted. The longest pause keeps what is lost by looking in vain
  // out of the 99th percentile.
  static constexpr std::uint32_t kMisses = 8;
  static constexpr std::uint32_t kFirstPause = 4;
  static constexpr std::uint32_t kLongestPause = 512;
  std::uint32_t misses_ = 0;  // since something was found last
  std::uint32_t skip_ = 0;
  std::uint32_t pause_ = kFirstPause;
};

// Tells the processor that this is a loop of looking.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace muxserve::memory
