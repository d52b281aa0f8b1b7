// One connection of the server: its socket, its session, and what has been read and not yet written.
#pragma once

#include <cstdint>

#include "dispatcher.hpp"

namespace muxserve::memory {

class Connection {
 public:
  Connection(int fd, std::int64_t opened) : fd_(fd), opened_(opened) {}
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }
  std::int64_t opened() const { return opened_; }
  bool greeted() const { return session_.client >= 0; }
  Session& session() { return session_; }

  // Reads what is there, bounded, and carries out every whole request. Stops reading once the connection is to be
  // closed or its output bound is reached.
  void read(Dispatcher& dispatcher, std::int64_t now);

  // Writes as much as the socket takes.
  void write();

  // Nothing more will be read. The last error frame has been written as far as the socket took it at once.
  bool closed() const { return broken_ || closing_; }
  void abandon() { broken_ = true; }
  bool has_output() const { return sent_ < out_.size(); }

  // What epoll should tell of: remembers what it was told last.
  std::uint32_t watched = 0;

 private:
  void handle_frames(Dispatcher& dispatcher, std::int64_t now);

  int fd_;
  std::int64_t opened_;
  Session session_;
  Bytes in_;               // grows to the largest message of this client, at most to the message bound
  std::size_t begin_ = 0;  // in_[begin_, end_) is read and not handled; begin_ stays 4-byte aligned
  std::size_t end_ = 0;
  Bytes out_;
  std::size_t sent_ = 0;
  bool closing_ = false;  // the client is told why, then the connection is closed
  bool broken_ = false;
};

}  // namespace muxserve::memory
