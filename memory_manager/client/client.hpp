// A client of the memory manager: one connection, one request at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "adaptive_spin.hpp"
#include "protocol.hpp"

namespace muxserve::memory {

// The manager cannot be reached or the connection to it is lost. Whatever the client held is released.
class Gone : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Calls may come from several threads; they are carried out one after another. Every call throws Refused if the manager
// refuses it and Gone if the connection is lost, also when no answer comes within the timeout.
class Client {
 public:
  // Connects and says HELLO. Throws Gone or Refused.
  Client(const std::string& path, const std::string& name, double timeout_seconds);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  std::uint64_t generation() const { return generation_; }
  int client_id() const { return client_id_; }
  // What HELLO answered: pools and models as JSON.
  const std::string& description() const { return description_; }
  bool connected() const { return fd_ >= 0; }
  // Ends the connection; a call that waits for its answer in another thread throws Gone.
  void close();

  // See Manager::step. `reply` keeps its memory from call to call.
  void step(const StepRequest& request, StepReply& reply);

  // Publishes and releases without waiting for an answer. A refusal is thrown by the first call after the one during
  // which it arrived.
  void post(const StepRequest& request);

  void hand_off(std::uint32_t model, const std::string& key, Span<std::int32_t> blocks, Span<std::int32_t> release,
                double ttl_seconds);
  void leave_window(std::uint32_t model, Span<std::int32_t> blocks);
  std::vector<std::int32_t> adopt(std::uint32_t model, const std::string& key);
  void drop(std::uint32_t model, const std::string& key);
  void set_quotas(const std::vector<std::pair<std::uint32_t, std::int64_t>>& quotas);
  void set_room(std::uint32_t pool, std::int64_t pages);
  std::string statistics();
  std::string describe();
  void reset_cache(std::uint32_t model);
  std::uint32_t add_model(const ModelConfig& model);
  void remove_model(std::uint32_t model);

 private:
  FrameWriter begin(Operation operation);
  Reader call(FrameWriter& frame);  // the view is good until the next call
  void send_frame(FrameWriter& frame);
  void send_all(const std::uint8_t* data, std::size_t size);
  void read_reply();
  void look_for_reply();
  void receive_at_least(std::size_t bytes);
  void throw_late_refusal();
  void disconnect();
  [[noreturn]] void lose(const std::string& why);
  [[noreturn]] void lose_by_time();
  void append_step(FrameWriter& frame, const StepRequest& request);

  std::mutex mutex_;
  std::string path_;
  std::int64_t timeout_ns_;
  std::atomic<int> fd_{-1};
  std::uint64_t generation_ = 0;
  int client_id_ = -1;
  std::string description_;
  std::uint32_t sequence_ = 0;
  AdaptiveSpin spin_;
  Bytes out_;
  Bytes in_;
  std::size_t begin_ = 0;  // in_[begin_, end_) is received and not consumed
  std::size_t end_ = 0;
  Header header_;  // of the reply read last; its payload lies before begin_
  Code late_code_ = Code::kOk;
  std::string late_words_;
};

}  // namespace muxserve::memory
