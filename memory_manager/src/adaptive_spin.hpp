// Looking for a message for a moment before sleeping, but only where that pays.
#pragma once

#include <algorithm>
#include <cstdint>

namespace muxserve::memory {

// Waking a thread that sleeps on another core costs tens of microseconds, more than most requests. Looking for the
// message instead pays if the other side runs on another core at that moment; on a busy machine it may be waiting for
// this very core, and looking only delays it. So looking is given up for a growing number of times whenever it finds
// nothing, and resumed when it does.
class AdaptiveSpin {
 public:
  // Whether to look this time. If so, found() must be told how it went.
  bool worth_it() {
    if (skip_ == 0) return true;
    --skip_;
    return false;
  }

  void found(bool it) {
    pause_ = it ? kFirstPause : std::min(2 * pause_, kLongestPause);
    skip_ = it ? 0 : pause_;
  }

 private:
  static constexpr std::uint32_t kFirstPause = 2;
  static constexpr std::uint32_t kLongestPause = 1024;
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
