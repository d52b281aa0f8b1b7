#include "server.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "connection.hpp"

namespace muxserve::memory {
namespace {

// Connections that have not said HELLO: so many may be open, for so long.
constexpr std::ptrdiff_t kMaxStrangers = 128;
constexpr std::int64_t kGreetingTime = 10'000'000'000;
// How long the next request is looked for before the thread sleeps, where that pays.
constexpr std::int64_t kSpinTime = 100'000;

std::int64_t clock_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

[[noreturn]] void fail(const std::string& what) { throw ServerError(what + ": " + std::strerror(errno)); }

}  // namespace

Server::Server(Dispatcher& dispatcher, std::string path)
    : dispatcher_(dispatcher), path_(std::move(path)), next_sweep_(kNever) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) fail("cannot make an event loop");
  watch(wake_, EPOLLIN, &wake_);
  listen_on(path_);
  watch(listener_, EPOLLIN, &listener_);
}

Server::~Server() {
  for (auto& connection : connections_) dispatcher_.end(connection->session());
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
  bool served = false;
  for (int i = 0; i < count; ++i) {
    void* tag = events[static_cast<std::size_t>(i)].data.ptr;
    if (tag == &wake_ || tag == &signals_) {
      stopping_ = true;
    } else if (tag == &listener_) {
      accept_all();
    } else {
      serve(*static_cast<Connection*>(tag), events[static_cast<std::size_t>(i)].events);
      last_core_ = static_cast<Connection*>(tag)->session().core;
      served = true;
    }
  }
  sweep();
  return served;
}

void Server::accept_all() {
  while (true) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    admit(fd);
  }
}

void Server::admit(int fd) {
  const auto strangers = std::count_if(connections_.begin(), connections_.end(),
                                       [](const auto& c) { return !c->greeted() && !c->closed(); });
  if (strangers >= kMaxStrangers) {
    // The oldest stranger goes: connections are in the order of their opening.
    const auto oldest = std::find_if(connections_.begin(), connections_.end(),
                                     [](const auto& c) { return !c->greeted() && !c->closed(); });
    (*oldest)->abandon();
  }
  connections_.push_back(std::make_unique<Connection>(fd, now_));
  Connection& connection = *connections_.back();
  connection.watched = EPOLLIN;
  watch(fd, EPOLLIN, &connection);
  next_sweep_ = strangers >= kMaxStrangers ? now_ : std::min(next_sweep_, now_ + kGreetingTime);
}

void Server::serve(Connection& connection, std::uint32_t events) {
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) connection.read(dispatcher_, now_);
  if (connection.has_output()) connection.write();
  if (connection.closed()) {
    next_sweep_ = now_;
    return;
  }
  const std::uint32_t wanted = connection.has_output() ? EPOLLIN | EPOLLOUT : EPOLLIN;
  if (wanted == connection.watched) return;
  connection.watched = wanted;
  epoll_event event{};
  event.events = wanted;
  event.data.ptr = &connection;
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.fd(), &event) != 0) fail("cannot watch a connection");
}

// Closes what is closed or has not said HELLO in time, and gives up hand-offs whose time is over. Never while events
// are being handled: they point to connections.
void Server::sweep() {
  if (now_ >= dispatcher_.manager().next_deadline()) dispatcher_.manager().expire(now_);
  if (now_ < next_sweep_) return;
  next_sweep_ = kNever;
  for (auto& connection : connections_) {
    const std::int64_t deadline = connection->opened() + kGreetingTime;
    if (connection->closed() || (!connection->greeted() && now_ >= deadline)) {
      dispatcher_.end(connection->session());
      connection.reset();
    } else if (!connection->greeted()) {
      next_sweep_ = std::min(next_sweep_, deadline);
    }
  }
  connections_.erase(std::remove(connections_.begin(), connections_.end(), nullptr), connections_.end());
}

// Milliseconds until there is something to do without an event, -1 if there is nothing.
int Server::timeout() const {
  const std::int64_t next = std::min(next_sweep_, dispatcher_.manager().next_deadline());
  const bool watched = heartbeat_ != nullptr && heartbeat_->watched();
  const std::int64_t longest = watched ? Heartbeat::kPeriodMs : 60'000;
  if (next == kNever) return watched ? Heartbeat::kPeriodMs : -1;
  const std::int64_t left = std::max<std::int64_t>(0, next - now_);
  return static_cast<int>(std::min<std::int64_t>(left / 1'000'000 + 1, longest));
}

}  // namespace muxserve::memory
