// From a request's bytes to the manager and back to bytes. No sockets.
#pragma once

#include <string>
#include <vector>

#include "manager.hpp"
#include "protocol.hpp"

namespace muxserve::memory {

// What the dispatcher remembers of one connection.
struct Session {
  int client = -1;         // the manager's client slot, -1 before HELLO
  std::uint32_t core = 0;  // Header::core of the last request
};

class Dispatcher {
 public:
  // `pool_handles`: by pool and rank, the name under which clients map it.
  Dispatcher(Manager& manager, PoolHandles pool_handles) : manager_(manager), pool_handles_(std::move(pool_handles)) {}

  // Carries one request out and appends the reply, if it has one, to `out`. A refusal becomes an error frame, and so
  // does a lack of memory: nothing of the request has been done then. False if the connection cannot go on after the
  // reply has been sent. Throws std::bad_alloc where not even the error can be told.
  bool handle(Session& session, const Header& header, Span<std::uint8_t> payload, std::int64_t now, Bytes& out);

  // Checks a header before its payload is read. If the connection cannot go on, appends the error and returns false.
  bool check_header(const Session& session, const Header& header, Bytes& out) const;

  // Appends the error frame that is all that a connection of another user gets.
  void forbid(const std::string& words, Bytes& out) const { refuse({}, Code::kForbidden, words, out); }

  // The connection is gone: gives back what the client held.
  void end(Session& session);

  Manager& manager() const { return manager_; }

 private:
  void carry_out(Session& session, const Header& header, Reader reader, std::int64_t now, Bytes& out);
  void greet(Session& session, Reader reader, FrameWriter& reply, Bytes& out);
  Header reply_to(const Header& header, Code status) const;
  void refuse(const Header& header, Code code, const std::string& words, Bytes& out) const;

  Manager& manager_;
  PoolHandles pool_handles_;
  StepReply step_reply_;
};

}  // namespace muxserve::memory
