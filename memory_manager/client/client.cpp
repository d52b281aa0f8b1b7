#include "client.hpp"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "clock.hpp"

namespace muxserve::memory {
namespace {

// How long a reply is looked for before the thread sleeps, where that pays: the time of a manager that has to be woken.
constexpr std::int64_t kAnswerSpinTime = 100'000;

}  // namespace

Client::Client(const std::string& path, const std::string& name, double timeout_seconds)
    : path_(path), timeout_ns_(static_cast<std::int64_t>(std::clamp(timeout_seconds, 0.001, 1e6) * 1e9)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path)
    throw Gone("the socket path \"" + path + "\" must have 1 to " + std::to_string(sizeof address.sun_path - 1) +
               " bytes");
  std::memcpy(address.sun_path, path.data(), path.size());
  fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd_ < 0 || connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const std::string why = std::strerror(errno);
    disconnect();
    throw Gone("no memory manager answers on \"" + path + "\": " + why);
  }
  // Blocking calls with a time limit: one system call each way.
  timeval limit{};
  limit.tv_sec = timeout_ns_ / 1'000'000'000;
  limit.tv_usec = timeout_ns_ % 1'000'000'000 / 1000;
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  in_.resize(64 << 10);
  try {
    FrameWriter frame = begin(Operation::kHello);
    frame.text(name).u32(static_cast<std::uint32_t>(getpid()));
    Reader reader = call(frame);
    client_id_ = static_cast<int>(reader.u32());
    description_ = reader.text();
    generation_ = header_.generation;
  } catch (...) {
    disconnect();
    throw;
  }
}

Client::~Client() { close(); }

void Client::close() {
  // The descriptor itself is closed under the lock only, so that no other thread can be using it.
  const int fd = fd_;
  if (fd >= 0) shutdown(fd, SHUT_RDWR);
  const std::lock_guard<std::mutex> lock(mutex_);
  disconnect();
}

void Client::disconnect() {
  const int fd = fd_.exchange(-1);
  if (fd >= 0) ::close(fd);
}

void Client::lose(const std::string& why) {
  disconnect();
  throw Gone("the memory manager on \"" + path_ + "\" is gone: " + why);
}

void Client::lose_by_time() {
  lose("no answer within " + std::to_string(static_cast<double>(timeout_ns_) / 1e9) + " s");
}

FrameWriter Client::begin(Operation operation) {
  if (fd_ < 0) throw Gone("the connection to the memory manager on \"" + path_ + "\" is closed");
  throw_late_refusal();
  out_.clear();
  Header header;
  header.operation = static_cast<std::uint16_t>(operation);
  header.generation = generation_;
  header.sequence = ++sequence_;
  header.core = this_core();
  return FrameWriter(out_, header);
}

void Client::throw_late_refusal() {
  if (late_code_ == Code::kOk) return;
  const Code code = late_code_;
  late_code_ = Code::kOk;
  throw Refused(code, "an earlier post was refused: " + late_words_);
}

Reader Client::call(FrameWriter& frame) {
  send_frame(frame);
  while (true) {
    read_reply();
    Reader reader(in_.data() + begin_ - header_.length, header_.length);
    const auto code = static_cast<Code>(header_.status);
    if (header_.sequence == sequence_) {
      if (code != Code::kOk) throw Refused(code, reader.text());
      return reader;
    }
    // The only other frames are refusals of posts. The present call has been carried out, so they wait.
    if (header_.operation != (static_cast<std::uint16_t>(Operation::kPost) | kReply))
      lose("its answers are out of order");
    late_code_ = code;
    late_words_ = reader.text();
  }
}

void Client::send_frame(FrameWriter& frame) {
  frame.finish();
  if (out_.size() - sizeof(Header) > kMaxPayload) {
    throw Refused(Code::kTooLarge, "the request has " + std::to_string(out_.size()) + " bytes, more than " +
                                       std::to_string(kMaxPayload) + "; split it");
  }
  send_all(out_.data(), out_.size());
}

void Client::send_all(const std::uint8_t* data, std::size_t size) {
  while (size > 0) {
    const ssize_t put = send(fd_, data, size, MSG_NOSIGNAL);
    if (put >= 0) {
      data += put;
      size -= static_cast<std::size_t>(put);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      lose_by_time();
    } else if (errno != EINTR) {
      lose(std::strerror(errno));
    }
  }
}

void Client::read_reply() {
  if (begin_ == end_) look_for_reply();
  receive_at_least(sizeof(Header));
  std::memcpy(&header_, in_.data() + begin_, sizeof header_);
  if (header_.magic != kMagic || header_.version != kVersion || header_.length > kMaxReply)
    lose("it does not speak this protocol");
  receive_at_least(sizeof(Header) + header_.length);
  begin_ += sizeof(Header) + header_.length;
}

// Looks for the reply for a moment, where that pays. Whatever happens, receive_at_least() goes on from there.
void Client::look_for_reply() {
  if (!spin_.worth_it(header_.core)) return;
  begin_ = end_ = 0;
  const std::int64_t end = clock_now() + kAnswerSpinTime;
  do {
    const ssize_t got = recv(fd_, in_.data(), in_.size(), MSG_DONTWAIT);
    if (got > 0) {
      end_ = static_cast<std::size_t>(got);
      spin_.found(true);
      return;
    }
    for (int i = 0; i < 8; ++i) relax();
  } while (clock_now() < end);
  spin_.found(false);
}

// Until in_[begin_, end_) has that many bytes.
void Client::receive_at_least(std::size_t bytes) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (begin_ + bytes > in_.size()) {
    std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    if (bytes > in_.size()) in_.resize(bytes);
  }
  while (end_ - begin_ < bytes) {
    const ssize_t got = recv(fd_, in_.data() + end_, in_.size() - end_, 0);
    if (got > 0) {
      end_ += static_cast<std::size_t>(got);
    } else if (got == 0) {
      lose("it closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      lose_by_time();
    } else if (errno != EINTR) {
      lose(std::strerror(errno));
    }
  }
}

void Client::append_step(FrameWriter& frame, const StepRequest& request) {
  frame.u32(request.model).u32(request.partial ? kPartial : 0).u32(request.reserve);
  frame.u32(static_cast<std::uint32_t>(request.release.size()));
  frame.u32(static_cast<std::uint32_t>(request.publish.size()));
  frame.u32(static_cast<std::uint32_t>(request.lookup_lengths.size()));
  frame.array(request.release).array(request.publish).array(request.lookup_lengths);
  frame.array(request.publish_hashes).array(request.lookup_hashes);
}

void Client::step(const StepRequest& request, StepReply& reply) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kStep);
  append_step(frame, request);
  Reader reader = call(frame);
  const std::uint32_t lookups = reader.u32();
  const std::uint32_t reserved = reader.u32();
  const auto copy = [](auto& to, const auto& from) { to.assign(from.begin(), from.end()); };
  copy(reply.hit_lengths, reader.array<std::uint32_t>(lookups));
  std::uint64_t hits = 0;
  for (const std::uint32_t length : reply.hit_lengths) hits += length;
  copy(reply.hits, reader.array<std::int32_t>(hits));
  copy(reply.reserved, reader.array<std::int32_t>(reserved));
}

void Client::post(const StepRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kPost);
  append_step(frame, request);
  send_frame(frame);
}

void Client::hand_off(std::uint32_t model, const std::string& key, Span<std::int32_t> blocks,
                      Span<std::int32_t> release, double ttl_seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const double ttl_ns = ttl_seconds * 1e9;
  if (!(ttl_ns >= 1) || ttl_ns > 1e18) throw Refused(Code::kInvalid, "a hand-off's time to live must be positive");
  FrameWriter frame = begin(Operation::kHandOff);
  frame.u32(model).i64(static_cast<std::int64_t>(ttl_ns));
  frame.u32(static_cast<std::uint32_t>(blocks.size())).u32(static_cast<std::uint32_t>(release.size()));
  frame.text(key).array(blocks).array(release);
  call(frame);
}

void Client::leave_window(std::uint32_t model, Span<std::int32_t> blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kLeaveWindow);
  frame.u32(model).u32(static_cast<std::uint32_t>(blocks.size())).array(blocks);
  call(frame);
}

std::vector<std::int32_t> Client::adopt(std::uint32_t model, const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kAdopt);
  frame.u32(model).text(key);
  Reader reader = call(frame);
  const Span<std::int32_t> blocks = reader.array<std::int32_t>(reader.u32());
  return std::vector<std::int32_t>(blocks.begin(), blocks.end());
}

void Client::drop(std::uint32_t model, const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kDrop);
  frame.u32(model).text(key);
  call(frame);
}

void Client::set_quotas(const std::vector<std::pair<std::uint32_t, std::int64_t>>& quotas) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kSetQuotas);
  frame.u32(static_cast<std::uint32_t>(quotas.size()));
  for (const auto& [model, pages] : quotas) frame.u32(model).i64(pages);
  call(frame);
}

void Client::set_room(std::uint32_t pool, std::int64_t pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kSetRoom);
  frame.u32(pool).i64(pages);
  call(frame);
}

std::string Client::statistics() {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kStatistics);
  return call(frame).text();
}

std::string Client::describe() {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kDescribe);
  return call(frame).text();
}

void Client::reset_cache(std::uint32_t model) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kResetCache);
  frame.u32(model);
  call(frame);
}

std::uint32_t Client::add_model(const ModelConfig& model) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kAddModel);
  write_model(frame, model);
  return call(frame).u32();
}

void Client::remove_model(std::uint32_t model) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FrameWriter frame = begin(Operation::kRemoveModel);
  frame.u32(model);
  call(frame);
}

}  // namespace muxserve::memory
