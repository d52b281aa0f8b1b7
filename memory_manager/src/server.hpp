// The manager behind a Unix stream socket: one thread, one epoll loop, never blocked by a client, and never ended by
// one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "adaptive_spin.hpp"
#include "descriptors.hpp"
#include "dispatcher.hpp"
#include "heartbeat.hpp"
#include "limits.hpp"
#include "own_log.hpp"

namespace muxserve::memory {

// The socket cannot be set up; what() says why.
class ServerError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Connection;

class Server {
 public:
  // Listens on `path`, replacing a socket file that nobody listens on. Throws ServerError.
  Server(Dispatcher& dispatcher, std::string path, const Limits& limits = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Serves until stop() is called or, if watch_signals() was, SIGTERM or SIGINT arrives.
  void run();

  // Ends run(); may be called from any thread.
  void stop();

  // Shows there that run() does not hang. Call before run().
  void beat_in(Heartbeat& heartbeat) { heartbeat_ = &heartbeat; }

  // Bytes of the buffers of all connections; may be called from any thread.
  std::size_t buffered() const { return buffered_.load(std::memory_order_relaxed); }

  // Takes SIGTERM and SIGINT as a request to stop. Call before threads are started.
  void watch_signals();

 private:
  void listen_on(const std::string& path);
  void watch(int fd, std::uint32_t events, void* tag);
  void accept_some();
  void admit(int fd);
  void serve(Connection& connection, std::uint32_t events);
  void update(Connection& connection);
  void count_buffers(Connection& connection);
  void sweep();
  void give_up_silent();
  void remove_closed();
  void depart(Connection& connection);
  void release_departed();
  int timeout() const;
  bool dispatch(int timeout_ms);

  Dispatcher& dispatcher_;
  std::string path_;
  Heartbeat* heartbeat_ = nullptr;
  OwnLog log_;
  std::int64_t log_due_ = 0;
  Limits limits_;
  int epoll_ = -1;
  int listener_ = -1;
  int wake_ = -1;
  int signals_ = -1;
  bool stopping_ = false;
  std::vector<std::unique_ptr<Connection>> connections_;
  // Clients that are gone or ending. What they had launched on a GPU may still write into their blocks: they are given
  // back at `due`, which is known when the process has ended.
  struct Departed {
    Session session;
    Descriptor process;
    std::int64_t due;
  };
  std::vector<Departed> departed_;
  // Connections whose last turn ended before their requests did: their next one comes without an event. `turns_` is the
  // list of the round under way.
  std::vector<Connection*> waiting_, turns_;
  std::uint64_t round_ = 0;
  std::atomic<std::size_t> buffered_{0};  // written by the one thread only
  std::int64_t now_ = 0;
  AdaptiveSpin spin_;
  std::uint32_t last_core_ = 0;  // where the client of the last request runs
  std::int64_t next_sweep_;      // when a connection may have to be closed
  std::int64_t accept_again_;    // when descriptors had run out: when new connections are looked at again
};

}  // namespace muxserve::memory
