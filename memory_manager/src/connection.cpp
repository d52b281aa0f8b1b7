#include "connection.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "clock.hpp"

namespace muxserve::memory {

void Connection::turn(Dispatcher& dispatcher, std::uint32_t events, std::int64_t now) {
  if (closed()) return;
  if (has_output()) write(now);
  if (congested()) {
    // Nothing is read from it now, so its end is seen only here.
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) broken_ = true;
    return;
  }
  // One read is enough: epoll is level-triggered, and other clients get their turn in between.
  if (!whole_frame_ && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive();
  if (!broken_) carry_out(dispatcher, now);
  if (has_output()) write(now);
}

void Connection::receive() {
  if (in_.empty()) in_.resize(kFirstBuffer);
  const ssize_t got = recv(fd(), in_.data() + end_, in_.size() - end_, 0);
  if (got > 0) {
    end_ += static_cast<std::size_t>(got);
  } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
    broken_ = true;
  }
}

// Whether in_ begins with a whole frame; if so, `header` is its header. Closes the connection where the header is
// wrong.
bool Connection::next_frame(Dispatcher& dispatcher, Header& header) {
  if (end_ - begin_ < sizeof(Header)) return false;
  std::memcpy(&header, in_.data() + begin_, sizeof header);
  if (!dispatcher.check_header(session_, header, out_)) {
    closing_ = true;
    return false;
  }
  return end_ - begin_ >= sizeof(Header) + header.length;
}

void Connection::carry_out(Dispatcher& dispatcher, std::int64_t now) {
  Header header;
  int count = 0;
  while ((whole_frame_ = next_frame(dispatcher, header))) {
    if (congested() || count == kMaxRequestsPerTurn || (count > 0 && clock_now() - now > kMaxTurnTime)) return;
    const Span<std::uint8_t> payload(in_.data() + begin_ + sizeof(Header), header.length);
    begin_ += sizeof(Header) + header.length;
    ++count;
    if (!dispatcher.handle(session_, header, payload, now, out_)) {
      closing_ = true;
      whole_frame_ = false;
      return;
    }
  }
  if (!closing_) tidy();
}

// Makes room for the rest of the message that in_ begins with, and gives back what only a large one needed.
void Connection::tidy() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
    if (in_.size() > kKeptBuffer) Bytes().swap(in_);
    return;
  }
  if (end_ < in_.size()) return;
  if (begin_ > 0) {
    std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  // Only with what has been sent: a header that announces megabytes costs nothing.
  if (end_ == in_.size()) in_.resize(std::min(2 * in_.size(), sizeof(Header) + kMaxPayload));
}

void Connection::write(std::int64_t now) {
  while (!broken_ && has_output()) {
    const ssize_t put = send(fd(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (put < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) broken_ = true;
      break;
    }
    sent_ += static_cast<std::size_t>(put);
    progress_ = now;
  }
  if (has_output()) {
    // A client that reads slowly never takes everything: what it has taken must not be kept.
    if (sent_ > out_.size() / 2) {
      out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(sent_));
      sent_ = 0;
    }
    return;
  }
  out_.clear();
  sent_ = 0;
  if (out_.capacity() > kKeptBuffer) Bytes().swap(out_);
}

void Connection::refuse(const Dispatcher& dispatcher, const std::string& words) {
  dispatcher.forbid(words, out_);
  write(opened_);
  closing_ = true;
}

std::uint32_t Connection::wanted_events() const {
  return (congested() ? 0u : EPOLLIN) | (has_output() ? EPOLLOUT : 0u);
}

std::int64_t Connection::deadline(const Limits& limits) const {
  if (!greeted()) return opened_ + kGreetingTime;
  return has_output() ? progress_ + limits.stall_time : kNever;
}

}  // namespace muxserve::memory
