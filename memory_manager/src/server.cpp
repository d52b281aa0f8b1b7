#include "server.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

#include "clock.hpp"
#include "connection.hpp"

namespace muxserve::memory {
namespace {

// How long the next request is looked for before the thread sleeps, where that pays.
constexpr std::int64_t kSpinTime = 100'000;
// So often it is looked whether the log still has its name.
constexpr std::int64_t kLogPeriod = 1'000'000'000;

[[noreturn]] void fail(const std::string& what) { throw ServerError(what + ": " + std::strerror(errno)); }

// The process at the other end; its pid is 0 where it is not known here.
std::optional<ucred> peer_of(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer;
}

// A pidfd of that process; none if it is gone.
Descriptor process_of(pid_t pid) {
  return Descriptor(pid > 0 ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1);
}

bool has_ended(const Descriptor& process) {
  pollfd look{process.get(), POLLIN, 0};
  return poll(&look, 1, 0) > 0;
}

// Whether the kernel has begun to end the process: it closes its files before it is dead.
bool is_ending(const Descriptor& process) {
  constexpr unsigned long kExiting = 0x4;  // PF_EXITING
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(process.get()));
  std::string word, pid;
  while (info >> word)
    if (word == "Pid:") info >> pid;
  std::ifstream file("/proc/" + pid + "/stat");
  // The process may end between opening and reading, which fails then: getline is told so, an iterator throws.
  std::string stat;
  std::getline(file, stat, '\0');
  const std::size_t name = stat.rfind(')');  // the name before it may hold anything
  if (name == std::string::npos) return true;
  std::istringstream rest(stat.substr(name + 1));
  std::string skipped;
  for (int i = 0; i < 6; ++i) rest >> skipped;  // state, ppid, pgrp, session, tty, tpgid
  unsigned long flags = 0;
  return !(rest >> flags) || (flags & kExiting) != 0;
}

}  // namespace

Server::Server(Dispatcher& dispatcher, std::string path, const Limits& limits)
    : dispatcher_(dispatcher), path_(std::move(path)), limits_(limits), next_sweep_(kNever), accept_again_(kNever) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) fail("cannot make an event loop");
  watch(wake_, EPOLLIN, &wake_);
  listen_on(path_);
  watch(listener_, EPOLLIN, &listener_);
}

Server::~Server() {
  for (auto& connection : connections_) dispatcher_.end(connection->session());
  for (auto& each : departed_) dispatcher_.end(each.session);
  connections_.clear();
  if (listener_ >= 0) {
    close(listener_);
    unlink(path_.c_str());
  }
  for (const int fd : {epoll_, wake_, signals_})
    if (fd >= 0) close(fd);
}

void Server::listen_on(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    throw ServerError("the socket path \"" + path + "\" must have 1 to " + std::to_string(sizeof address.sun_path - 1) +
                      " bytes");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  struct stat status{};
  if (lstat(path.c_str(), &status) == 0) {
    if (!S_ISSOCK(status.st_mode)) throw ServerError("\"" + path + "\" exists and is no socket");
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0) fail("cannot make a socket");
    const int connected = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address);
    const int error = errno;
    close(probe);
    if (connected == 0 || error == EAGAIN) throw ServerError("something is listening on \"" + path + "\" already");
    unlink(path.c_str());  // left behind by a server that was killed
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) fail("cannot make a socket");
  const mode_t before = umask(0177);  // only this user may connect
  const int bound = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  const int error = errno;
  umask(before);
  if (bound != 0 || ::listen(fd, 1024) != 0) {
    if (bound != 0) errno = error;
    const int reason = errno;
    close(fd);
    errno = reason;
    fail("cannot listen on \"" + path + "\"");
  }
  listener_ = fd;
}

void Server::watch(int fd, std::uint32_t events, void* tag) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = tag;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) fail("cannot watch a file descriptor");
}

void Server::watch_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) fail("cannot watch signals");
  watch(signals_, EPOLLIN, &signals_);
}

void Server::stop() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_, &one, sizeof one);
}

void Server::run() {
  now_ = clock_now();
  while (!stopping_) {
    bool served = dispatch(timeout());
    while (served && !stopping_ && spin_.worth_it(last_core_)) {
      const std::int64_t end = now_ + kSpinTime;
      do {
        served = dispatch(0);
      } while (!served && !stopping_ && now_ < end);
      spin_.found(served);
    }
  }
}

// Waits for events and handles them; true if a client had something to say.
bool Server::dispatch(int timeout_ms) {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout_ms);
  if (count < 0 && errno != EINTR) fail("cannot wait for events");
  now_ = clock_now();
  if (heartbeat_ != nullptr) heartbeat_->beat();
  if (now_ >= log_due_) {
    log_due_ = now_ + kLogPeriod;
    log_.follow();
  }
  ++round_;
  turns_.swap(waiting_);
  waiting_.clear();
  bool served = false;
  for (int i = 0; i < count; ++i) {
    void* tag = events[static_cast<std::size_t>(i)].data.ptr;
    if (tag == &wake_ || tag == &signals_) {
      stopping_ = true;
    } else if (tag == &listener_) {
      accept_some();
    } else {
      serve(*static_cast<Connection*>(tag), events[static_cast<std::size_t>(i)].events);
      last_core_ = static_cast<Connection*>(tag)->session().core;
      served = true;
    }
  }
  for (Connection* connection : turns_) {
    if (connection->round == round_) continue;  // it has had its turn
    serve(*connection, 0);
    served = true;
  }
  sweep();
  return served;
}

void Server::accept_some() {
  for (int i = 0; i < kMaxAcceptsPerTurn; ++i) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      admit(fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // epoll would tell of the connection that cannot be taken again and again.
      epoll_ctl(epoll_, EPOLL_CTL_DEL, listener_, nullptr);
      accept_again_ = now_ + kAcceptPause;
      return;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

void Server::admit(int fd) {
  const auto stranger = [](const auto& c) { return !c->greeted() && !c->closed(); };
  const auto strangers = std::count_if(connections_.begin(), connections_.end(), stranger);
  Descriptor descriptor(fd);
  try {
    const std::optional<ucred> peer = peer_of(fd);
    auto connection = std::make_unique<Connection>(
        std::move(descriptor), now_, limits_.linger_time > 0 && peer ? process_of(peer->pid) : Descriptor());
    if (!peer || (peer->uid != geteuid() && peer->uid != 0)) {
      connection->refuse(dispatcher_, "this memory manager serves only the user that it runs as");
      return;
    }
    connection->watched = EPOLLIN;
    connections_.reserve(connections_.size() + 1);
    departed_.reserve(departed_.size() + connections_.size() + 1);
    waiting_.reserve(connections_.size() + 1);
    turns_.reserve(connections_.size() + 1);
    watch(fd, EPOLLIN, connection.get());
    next_sweep_ = std::min(next_sweep_, connection->deadline(limits_));
    connections_.push_back(std::move(connection));
  } catch (const std::exception&) {
    return;  // no memory, here or in the kernel: the connection ends
  }
  if (strangers < kMaxStrangers) return;
  // The oldest stranger goes: connections are in the order of their opening.
  (*std::find_if(connections_.begin(), connections_.end(), stranger))->abandon();
  next_sweep_ = now_;
}

// One turn of a connection. Whatever happens in it is the end of that connection at most.
void Server::serve(Connection& connection, std::uint32_t events) {
  connection.round = round_;
  try {
    connection.turn(dispatcher_, events, now_);
    update(connection);
  } catch (const std::exception&) {
    connection.abandon();
  }
  count_buffers(connection);
  if (connection.closed()) {
    next_sweep_ = now_;
    return;
  }
  if (connection.wants_turn()) waiting_.push_back(&connection);
  next_sweep_ = std::min(next_sweep_, connection.deadline(limits_));
}

void Server::update(Connection& connection) {
  const std::uint32_t wanted = connection.wanted_events();
  if (wanted == connection.watched || connection.closed()) return;
  connection.watched = wanted;
  epoll_event event{};
  event.events = wanted;
  event.data.ptr = &connection;
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.fd(), &event) != 0) fail("cannot watch a connection");
}

// Closes the connections with the largest buffers while all of them together are too large.
void Server::count_buffers(Connection& connection) {
  const std::size_t bytes = connection.buffered();
  if (bytes == connection.counted) return;
  buffered_ += bytes - connection.counted;
  connection.counted = bytes;
  while (buffered_ > limits_.buffer_bytes) {
    Connection& largest = **std::max_element(connections_.begin(), connections_.end(),
                                             [](const auto& a, const auto& b) { return a->counted < b->counted; });
    largest.abandon();
    buffered_ -= largest.counted;
    largest.counted = 0;
    next_sweep_ = now_;
  }
}

// What time brings: hand-offs that nobody has adopted, connections that are over, and new ones after a pause. Never
// while events are being handled: they point to connections.
void Server::sweep() {
  if (now_ >= dispatcher_.manager().next_deadline()) dispatcher_.manager().expire(now_);
  if (now_ >= accept_again_) {
    accept_again_ = kNever;
    watch(listener_, EPOLLIN, &listener_);
  }
  if (now_ < next_sweep_) return;
  next_sweep_ = kNever;
  give_up_silent();
  remove_closed();
  release_departed();
}

// Connections that have not said HELLO, or not taken any of their replies, in time.
void Server::give_up_silent() {
  for (const auto& connection : connections_) {
    if (connection->closed() || now_ < connection->deadline(limits_)) continue;
    // It may have been this process that stood still: what the client has sent or taken meanwhile counts.
    if (connection->round != round_) serve(*connection, EPOLLIN);
    if (now_ >= connection->deadline(limits_)) connection->abandon();
  }
}

void Server::remove_closed() {
  const auto closed = [](const auto& connection) { return connection->closed(); };
  waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), closed), waiting_.end());
  turns_.clear();
  for (const auto& connection : connections_) {
    if (!connection->closed()) {
      next_sweep_ = std::min(next_sweep_, connection->deadline(limits_));
      continue;
    }
    depart(*connection);
    buffered_ -= connection->counted;
  }
  connections_.erase(std::remove_if(connections_.begin(), connections_.end(), closed), connections_.end());
}

// A client that goes on living has finished what it computed, one that dies has not.
void Server::depart(Connection& connection) {
  Descriptor& process = connection.process();
  const bool dies = !process || has_ended(process) || is_ending(process);
  if (limits_.linger_time == 0 || !connection.greeted() || !dies) {
    dispatcher_.end(connection.session());
    return;
  }
  departed_.push_back({connection.session(), std::move(process), kNever});
  connection.session().client = -1;
}

void Server::release_departed() {
  for (Departed& each : departed_) {
    if (each.due == kNever && (!each.process || has_ended(each.process))) each.due = now_ + limits_.linger_time;
    if (now_ >= each.due) dispatcher_.end(each.session);
    next_sweep_ = std::min(next_sweep_, each.due == kNever ? now_ + kExitPoll : each.due);
  }
  const auto released = [&](const Departed& each) { return now_ >= each.due; };
  departed_.erase(std::remove_if(departed_.begin(), departed_.end(), released), departed_.end());
}

// Milliseconds until there is something to do without an event, -1 if there is nothing.
int Server::timeout() const {
  if (!waiting_.empty()) return 0;
  const std::int64_t next = std::min({next_sweep_, accept_again_, dispatcher_.manager().next_deadline()});
  const bool watched = heartbeat_ != nullptr && heartbeat_->watched();
  const std::int64_t longest = watched ? Heartbeat::kPeriodMs : 60'000;
  if (next == kNever) return watched ? Heartbeat::kPeriodMs : -1;
  const std::int64_t left = std::max<std::int64_t>(0, next - now_);
  return static_cast<int>(std::min<std::int64_t>(left / 1'000'000 + 1, longest));
}

}  // namespace muxserve::memory
