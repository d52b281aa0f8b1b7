// A sign of life of the main loop for whoever can kill and restart this process; see muxserve/net/heartbeat.py.
#pragma once

#include <cstdint>
#include <string>

namespace muxserve::memory {

class Heartbeat {
 public:
  // The longest that a loop which has nothing to do stays silent, milliseconds.
  static constexpr int kPeriodMs = 250;

  // Beats nowhere.
  Heartbeat() = default;
  // Beats in the file at `path`, nowhere if that is empty. A file that cannot be made is no reason not to serve.
  explicit Heartbeat(const std::string& path);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  bool watched() const { return beats_ != nullptr; }

  // The loop has come round.
  void beat() {
    if (beats_ != nullptr) *beats_ = *beats_ + 1;
  }

 private:
  volatile std::uint64_t* beats_ = nullptr;
};

}  // namespace muxserve::memory
