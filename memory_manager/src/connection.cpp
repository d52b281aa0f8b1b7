#include "connection.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace muxserve::memory {
namespace {

constexpr std::size_t kFirstBuffer = 64 << 10;
// A client that lets so much pile up does not read at all: one reply is smaller.
constexpr std::size_t kMaxOutput = 2 * (sizeof(Header) + kMaxPayload);

}  // namespace

Connection::~Connection() {
  if (fd_ >= 0) close(fd_);
}

void Connection::read(Dispatcher& dispatcher, std::int64_t now) {
  if (closing_ || broken_) return;
  if (in_.empty()) in_.resize(kFirstBuffer);
  // One read per wake-up is enough: epoll is level-triggered, and other clients get their turn in between.
  const ssize_t got = recv(fd_, in_.data() + end_, in_.size() - end_, 0);
  if (got < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) broken_ = true;
    return;
  }
  if (got == 0) {
    broken_ = true;
    return;
  }
  end_ += static_cast<std::size_t>(got);
  handle_frames(dispatcher, now);
}

void Connection::handle_frames(Dispatcher& dispatcher, std::int64_t now) {
  std::size_t needed = sizeof(Header);
  while (end_ - begin_ >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, in_.data() + begin_, sizeof header);
    if (!dispatcher.check_header(header, out_)) {
      closing_ = true;
      return;
    }
    needed = sizeof(Header) + header.length;
    if (end_ - begin_ < needed) break;
    const Span<std::uint8_t> payload(in_.data() + begin_ + sizeof(Header), header.length);
    begin_ += needed;
    needed = sizeof(Header);
    if (!dispatcher.handle(session_, header, payload, now, out_)) {
      closing_ = true;
      return;
    }
    if (out_.size() - sent_ > kMaxOutput) {
      broken_ = true;
      return;
    }
  }
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (in_.size() - begin_ < needed) {
    // The rest of the message does not fit behind what is there.
    std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (in_.size() < needed) in_.resize(std::max(needed, std::min(2 * in_.size(), sizeof(Header) + kMaxPayload)));
}

void Connection::write() {
  while (!broken_ && has_output()) {
    const ssize_t put = send(fd_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (put < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) broken_ = true;
      return;
    }
    sent_ += static_cast<std::size_t>(put);
  }
  out_.clear();
  sent_ = 0;
}

}  // namespace muxserve::memory
