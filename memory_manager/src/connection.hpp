// One connection of the server: its socket, its session, and what has been read and not yet written.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "descriptors.hpp"
#include "dispatcher.hpp"
#include "limits.hpp"

namespace muxserve::memory {

// Requests are carried out in turns: a client that sends without a pause, or whose requests are expensive, does not
// keep the others waiting. A client that does not take its replies is not read until it does, so that what is kept for
// it is one reply and some bytes.
class Connection {
 public:
  // `process`: a pidfd of the client, if it is to be waited for when it dies.
  Connection(Descriptor socket, std::int64_t opened, Descriptor process = {})
      : socket_(std::move(socket)), process_(std::move(process)), opened_(opened), progress_(opened) {}

  int fd() const { return socket_.get(); }
  bool greeted() const { return session_.client >= 0; }
  Session& session() { return session_; }
  Descriptor& process() { return process_; }

  // One turn, with the events that epoll told of (0 if it is the connection's turn without any): writes what the socket
  // takes, reads once, carries out a bounded number of requests, and writes their replies. Throws std::bad_alloc; the
  // connection cannot go on then.
  void turn(Dispatcher& dispatcher, std::uint32_t events, std::int64_t now);

  // The client is told why, and that is all.
  void refuse(const Dispatcher& dispatcher, const std::string& words);

  // Whether another turn has something to do even if epoll tells of nothing.
  bool wants_turn() const { return whole_frame_ && !congested() && !closed(); }

  // What epoll should tell of.
  std::uint32_t wanted_events() const;

  // Nothing more will be read. The last error frame has been written as far as the socket took it at once.
  bool closed() const { return broken_ || closing_; }
  void abandon() { broken_ = true; }

  // When the client is given up unless it says HELLO or takes some of its replies before; kNever if nothing is awaited.
  std::int64_t deadline(const Limits& limits) const;

  // Bytes of the buffers.
  std::size_t buffered() const { return in_.capacity() + out_.capacity(); }

  // For the server: what epoll was told last, and what was counted of buffered().
  std::uint32_t watched = 0;
  std::size_t counted = 0;
  // ... and the last round in which the connection had a turn.
  std::uint64_t round = 0;

 private:
  bool has_output() const { return sent_ < out_.size(); }
  bool congested() const { return out_.size() - sent_ > kMaxPendingReplies; }
  void receive();
  void carry_out(Dispatcher& dispatcher, std::int64_t now);
  bool next_frame(Dispatcher& dispatcher, Header& header);
  void tidy();
  void write(std::int64_t now);

  Descriptor socket_;
  Descriptor process_;
  std::int64_t opened_;
  std::int64_t progress_;  // when output began to wait, or some of it was taken
  Session session_;
  Bytes in_;               // grows with what the client has sent, at most to the message bound
  std::size_t begin_ = 0;  // in_[begin_, end_) is read and not handled; begin_ stays 4-byte aligned
  std::size_t end_ = 0;
  bool whole_frame_ = false;  // there is a request in it that has not had its turn
  Bytes out_;
  std::size_t sent_ = 0;
  bool closing_ = false;  // the client is told why, then the connection is closed
  bool broken_ = false;
};

}  // namespace muxserve::memory
