// Fuzzers: requests made up by rules and bytes made up by chance, against the dispatcher with the books checked after
// each, and against a server on a real socket, with slow readers, half frames and floods beside a client that must be
// served all the time.
#include "fuzz.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "client/client.hpp"
#include "dispatcher.hpp"
#include "failing_allocations.hpp"
#include "server.hpp"
#include "text.hpp"

namespace muxserve::memory::testing {
namespace {

Limits tight_limits() {
  Limits limits;
  limits.hand_offs_per_client = 3;
  limits.hand_offs_per_model = 5;
  limits.table_bytes = 200'000;
  return limits;
}

// What every reply must be, whatever was asked.
void check_reply(const Bytes& out, Header& header) {
  ASSERT_GE(out.size(), sizeof(Header));
  std::memcpy(&header, out.data(), sizeof header);
  ASSERT_EQ(out.size(), sizeof(Header) + header.length);
  ASSERT_EQ(out.size() % 4, 0u);
  const auto code = static_cast<Code>(header.status);
  ASSERT_STRNE(code_name(code), "UNKNOWN");
  Reader reader(out.data() + sizeof(Header), header.length);
  if (code != Code::kOk) {
    const std::string words = reader.text();
    reader.end();
    ASSERT_EQ(name_problem(words, kMaxRefusalBytes), "");
  } else if (header.operation == (static_cast<std::uint16_t>(Operation::kStatistics) | kReply) ||
             header.operation == (static_cast<std::uint16_t>(Operation::kDescribe) | kReply)) {
    ASSERT_TRUE(is_utf8(reader.text()));
  }
}

struct FuzzedClient {
  FuzzedClient(std::uint32_t seed) : frames(seed) {}
  FrameFuzzer frames;
  Session session;
};

// Remembers the blocks of a good reply, so that later requests name them.
void remember(FrameFuzzer& frames, const Bytes& out, const Header& header) {
  Reader reader(out.data() + sizeof(Header), header.length);
  const auto add = [&](Span<std::int32_t> ids) { frames.held.insert(frames.held.end(), ids.begin(), ids.end()); };
  if (header.operation == (static_cast<std::uint16_t>(Operation::kStep) | kReply)) {
    const std::uint32_t lookups = reader.u32(), reserved = reader.u32();
    std::uint64_t hits = 0;
    for (const std::uint32_t length : reader.array<std::uint32_t>(lookups)) hits += length;
    add(reader.array<std::int32_t>(hits));
    add(reader.array<std::int32_t>(reserved));
    reader.end();
  } else if (header.operation == (static_cast<std::uint16_t>(Operation::kAdopt) | kReply)) {
    add(reader.array<std::int32_t>(reader.u32()));
    reader.end();
  }
  if (frames.held.size() > 40) frames.held.erase(frames.held.begin(), frames.held.end() - 40);
}

TEST(Fuzz, RequestsByTheRulesKeepTheBooks) {
  std::array<int, 32> codes{};
  for_each_seed(12, [&](std::uint32_t seed) {
    HeapSegments segments;
    Manager manager(small_config(), segments, 7, tight_limits());
    Dispatcher dispatcher(manager, {{"posix:x"}});
    FrameFuzzer choice(seed);
    std::vector<FuzzedClient> clients;
    for (std::uint32_t i = 0; i < 4; ++i) clients.emplace_back(seed * 16 + i);
    std::int64_t now = 0;
    for (int i = 0; i < 1500 && !::testing::Test::HasFailure(); ++i) {
      FuzzedClient& client = clients[choice.pick(4)];
      client.frames.greeted = client.session.client >= 0;
      Operation operation{};
      const Bytes frame = client.frames.frame(operation);
      Header header;
      std::memcpy(&header, frame.data(), sizeof header);
      Bytes out;
      if (!dispatcher.check_header(client.session, header, out)) {
        check_reply(out, header);
        dispatcher.end(client.session);
        continue;
      }
      // On the heap at its exact size, so that every read beyond the end is seen.
      const Bytes payload(frame.begin() + sizeof(Header), frame.end());
      const bool no_memory = choice.one_in(8);
      bool goes_on = true;
      {
        const FailingAllocation failing(no_memory ? static_cast<int>(choice.pick(12)) : -1);
        try {
          goes_on = dispatcher.handle(client.session, header, payload, now, out);
        } catch (const std::bad_alloc&) {
          goes_on = false;  // the server closes the connection then
          out.clear();
        }
      }
      if (!out.empty()) {
        Header reply;
        check_reply(out, reply);
        ++codes[reply.status];
        if (reply.status == 0) remember(client.frames, out, reply);
      }
      manager.check();
      if (!goes_on || choice.one_in(200)) dispatcher.end(client.session);
      if (choice.one_in(50)) manager.expire(now += choice.pick(2000));
    }
    for (FuzzedClient& client : clients) dispatcher.end(client.session);
    manager.expire(kNever);
    manager.check();
    for (std::uint32_t model = 0; model < 2; ++model) {
      if (refusal([&] { manager.model(model); }) != Code::kOk) continue;  // it has been removed
      EXPECT_EQ(manager.model(model).used_pages(), 0);
    }
  });
  if (std::getenv("MUXSERVE_FUZZ_SEED") != nullptr) return;
  // It gets everywhere.
  for (const Code code :
       {Code::kOk, Code::kMalformed, Code::kWrongGeneration, Code::kNotGreeted, Code::kUnknownOperation,
        Code::kUnknownModel, Code::kNotOwner, Code::kKeyExists, Code::kUnknownKey, Code::kQuotaExceedsPool,
        Code::kModelInUse, Code::kInvalid, Code::kExhausted, Code::kNoMemory})
    EXPECT_GT(codes[static_cast<std::size_t>(code)], 0) << code_name(code);
}

// ---------------------------------------------------------------------------- the file with the configuration

// On the heap at its exact size, so that every read beyond the end is seen.
Config decoded(const Bytes& file) { return decode_config(Bytes(file.begin(), file.end())); }

TEST(Fuzz, ConfigurationsAreDecodedAsTheyWereEncoded) {
  int good = 0, bad = 0;
  for_each_seed(400, [&](std::uint32_t seed) {
    const Config config = FrameFuzzer(seed).config();
    const Bytes file = encode_config(config);
    const Config again = decoded(file);
    EXPECT_EQ(encode_config(again), file);  // nothing is lost: every value of it is in the encoding
    EXPECT_EQ(again.models.size(), config.models.size());
    try {
      check_config(again);
      HeapSegments segments;
      Manager(again, segments, 7).check();
      ++good;
    } catch (const ConfigError&) {
      EXPECT_THROW(check_config(config), ConfigError);
      ++bad;
    }
  });
  if (std::getenv("MUXSERVE_FUZZ_SEED") != nullptr) return;
  EXPECT_GT(good, 0);
  EXPECT_GT(bad, 0);
}

TEST(Fuzz, ConfigurationsCutShortAreRefused) {
  const Bytes file = encode_config(small_config());
  for (std::size_t size = 0; size < file.size(); ++size) {
    Bytes cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THROW(decoded(cut), ConfigError) << size;
    if (size < sizeof(Header)) continue;
    const auto length = static_cast<std::uint32_t>(size - sizeof(Header));
    std::memcpy(cut.data() + offsetof(Header, length), &length, sizeof length);
    EXPECT_THROW(decoded(cut), ConfigError) << size;
  }
}

TEST(Fuzz, ConfigurationsOfAnyBytesAreRefusedOrRead) {
  int read = 0, refused = 0;
  for_each_seed(400, [&](std::uint32_t seed) {
    FrameFuzzer fuzzer(seed);
    for (int i = 0; i < 5; ++i) {
      Bytes file = encode_config(fuzzer.config());
      fuzzer.spoil(file);
      try {
        const Config config = decoded(file);
        ++read;
        check_config(config);
        check_config(decoded(encode_config(config)));
      } catch (const ConfigError&) {
        ++refused;
      }
    }
  });
  if (std::getenv("MUXSERVE_FUZZ_SEED") != nullptr) return;
  EXPECT_GT(read, 0);
  EXPECT_GT(refused, 0);
}

// ---------------------------------------------------------------------------- a server on a socket

class FuzzedServer {
 public:
  explicit FuzzedServer(const Limits& limits) : manager_(small_config(), segments_, 7, limits) {
    char name[] = "/tmp/mux-memory-XXXXXX";
    directory_ = mkdtemp(name);
    path_ = directory_ + "/s";
    server_ = std::make_unique<Server>(dispatcher_, path_, limits);
    thread_ = std::thread([this] { server_->run(); });
  }

  ~FuzzedServer() {
    server_->stop();
    thread_.join();
    server_.reset();
    rmdir(directory_.c_str());
    manager_.expire(kNever);
    manager_.check();
    for (std::uint32_t model = 0; model < 2; ++model) EXPECT_EQ(manager_.model(model).used_pages(), 0);
  }

  const std::string& path() const { return path_; }

  int connect_raw() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(path_.begin(), path_.end(), address.sun_path);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }

 private:
  HeapSegments segments_;
  Manager manager_;
  Dispatcher dispatcher_{manager_, {{"posix:x"}}};
  std::string directory_, path_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
};

// One connection that behaves badly. Nothing here waits for the server.
class BadClient {
 public:
  BadClient(const FuzzedServer& server, std::uint32_t seed) : frames_(seed), fd_(server.connect_raw()) {
    slow_reader_ = frames_.one_in(3);
  }
  ~BadClient() { close(fd_); }
  BadClient(const BadClient&) = delete;
  BadClient& operator=(const BadClient&) = delete;

  // False if the server has hung up, or the client has had enough.
  bool act() {
    if (frames_.one_in(150)) return false;
    if (frames_.one_in(300)) shutdown(fd_, frames_.one_in(2) ? SHUT_WR : SHUT_RD);
    if (!read_some()) return false;
    if (unsent_.size() > (1u << 20)) return true;  // it sends what it has first
    for (std::uint32_t i = 0, n = frames_.one_in(20) ? 400 : frames_.pick(4); i < n; ++i) add_frame();
    return send_some();
  }

 private:
  void add_frame() {
    frames_.greeted = greeted_;
    Operation operation{};
    Bytes frame = frames_.frame(operation);
    if (operation == Operation::kHello) greeted_ = true;  // probably
    if (operation == Operation::kRemoveModel) return;     // the other clients need the models
    if (operation == Operation::kSetQuotas || operation == Operation::kAddModel) return;
    if (frames_.one_in(400)) {  // any bytes
      for (std::uint8_t& byte : frame) byte = static_cast<std::uint8_t>(frames_.pick(256));
    } else if (frames_.one_in(400)) {  // a frame that never ends, or not for long
      const std::uint32_t length = frames_.one_in(2) ? kMaxPayload : 4 * frames_.pick(1 << 18);
      std::memcpy(frame.data() + offsetof(Header, length), &length, sizeof length);
    }
    unsent_.insert(unsent_.end(), frame.begin(), frame.end());
  }

  bool send_some() {
    const std::size_t most = frames_.one_in(3) ? 1 + frames_.pick(50) : unsent_.size();
    const std::size_t size = std::min(most, unsent_.size());
    if (size == 0) return true;
    const ssize_t put = send(fd_, unsent_.data(), size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0) return errno == EAGAIN;
    unsent_.erase(unsent_.begin(), unsent_.begin() + put);
    return true;
  }

  bool read_some() {
    char buffer[4096];
    if (slow_reader_ && !frames_.one_in(30)) return true;
    const ssize_t got = recv(fd_, buffer, slow_reader_ ? 100 : sizeof buffer, MSG_DONTWAIT);
    return got > 0 || (got < 0 && errno == EAGAIN);
  }

  FrameFuzzer frames_;
  int fd_;
  bool slow_reader_ = false;
  bool greeted_ = false;
  Bytes unsent_;
};

TEST(Fuzz, BadClientsDoNotKeepTheServerFromServing) {
  for_each_seed(3, [&](std::uint32_t seed) {
    Limits limits = tight_limits();
    limits.stall_time = 50'000'000;
    limits.buffer_bytes = 8u << 20;
    FuzzedServer server(limits);
    FrameFuzzer choice(seed);
    Client bystander(server.path(), "bystander", 60);
    std::vector<std::unique_ptr<BadClient>> clients(12);
    std::uint32_t made = 0;
    StepReply reply;
    for (int i = 0; i < 1200; ++i) {
      auto& client = clients[choice.pick(12)];
      if (client == nullptr) client = std::make_unique<BadClient>(server, seed * 1024 + ++made);
      if (!client->act()) client.reset();
      if (i % 4 != 0) continue;
      StepRequest request;
      request.model = kB;
      request.reserve = 1;
      request.partial = true;
      bystander.step(request, reply);  // throws if it is not answered
      const std::vector<std::int32_t> blocks = reply.reserved;
      request.reserve = 0;
      request.release = blocks;
      bystander.post(request);
    }
    EXPECT_GT(made, 12u);
  });
}

TEST(Fuzz, FloodsOfConnectionsDoNotKeepTheServerFromServing) {
  for_each_seed(2, [&](std::uint32_t seed) {
    FuzzedServer server(Limits{});
    FrameFuzzer choice(seed);
    Client bystander(server.path(), "bystander", 60);
    std::vector<int> open;
    for (int i = 0; i < 1500; ++i) {
      const int fd = server.connect_raw();
      if (choice.one_in(2)) {
        Bytes hello;
        Header header;
        header.operation = static_cast<std::uint16_t>(Operation::kHello);
        FrameWriter(hello, header).text("flood").u32(1).finish();
        const std::size_t size =
            choice.one_in(2) ? hello.size() : choice.pick(static_cast<std::uint32_t>(hello.size()));
        if (send(fd, hello.data(), size, MSG_NOSIGNAL) < 0) EXPECT_TRUE(errno == EPIPE || errno == ECONNRESET);
      }
      open.push_back(fd);
      while (open.size() > 150 || (!open.empty() && choice.one_in(2))) {
        const auto at = open.begin() + choice.pick(static_cast<std::uint32_t>(open.size()));
        close(*at);
        open.erase(at);
      }
      if (i % 50 == 0) bystander.describe();
    }
    for (const int fd : open) close(fd);
  });
}

}  // namespace
}  // namespace muxserve::memory::testing
