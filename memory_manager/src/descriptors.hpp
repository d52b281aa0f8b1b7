// File descriptors between processes, over Unix sockets.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace muxserve::memory {

// A descriptor that is closed when its owner is done.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// Sends `text`, with `fd` if it is not -1, as one message. False if the other side is gone.
bool send_message(int socket, const std::string& text, int fd = -1);

// One message of at most 4 KiB and the descriptor that came with it, if any. An empty text: the other side is gone, or
// nothing came within the socket's time limit.
std::pair<std::string, Descriptor> receive_message(int socket);

}  // namespace muxserve::memory
