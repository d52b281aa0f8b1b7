// The server on a real socket with real clients in other threads.
#include "server.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "client/client.hpp"
#include "clock.hpp"
#include "support.hpp"

namespace muxserve::memory::testing {
namespace {

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    char name[] = "/tmp/mux-memory-XXXXXX";
    directory_ = mkdtemp(name);
    path_ = directory_ + "/s";
    server_ = std::make_unique<Server>(dispatcher_, path_);
    thread_ = std::thread([this] { server_->run(); });
  }

  ~ServerTest() override {
    stop();
    rmdir(directory_.c_str());
  }

  // Another server for the same manager.
  void restart(const Limits& limits) {
    stop();
    server_ = std::make_unique<Server>(dispatcher_, path_, limits);
    thread_ = std::thread([this] { server_->run(); });
  }

  void stop() {
    if (!thread_.joinable()) return;
    server_->stop();
    thread_.join();
    fixture_.manager.check();
    server_.reset();
  }

  int connect_raw() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof address.sun_path - 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }

  // ... that has said HELLO.
  int connect_raw(const std::string& name) {
    const int fd = connect_raw();
    Bytes hello;
    Header header;
    header.operation = static_cast<std::uint16_t>(Operation::kHello);
    FrameWriter(hello, header).text(name).u32(1).finish();
    EXPECT_EQ(send(fd, hello.data(), hello.size(), MSG_NOSIGNAL), static_cast<ssize_t>(hello.size()));
    EXPECT_EQ(recv(fd, &header, sizeof header, MSG_WAITALL), static_cast<ssize_t>(sizeof header));
    Bytes payload(header.length);
    EXPECT_EQ(recv(fd, payload.data(), payload.size(), MSG_WAITALL), static_cast<ssize_t>(payload.size()));
    return fd;
  }

  static std::vector<std::int32_t> reserve(Client& client, std::uint32_t model, std::uint32_t count) {
    StepRequest request;
    request.model = model;
    request.reserve = count;
    StepReply reply;
    client.step(request, reply);
    return reply.reserved;
  }

  static void release(Client& client, std::uint32_t model, const std::vector<std::int32_t>& blocks) {
    StepRequest request;
    request.model = model;
    request.release = blocks;
    client.post(request);
  }

  // The status of the one frame that the server sends before it closes the connection.
  static Code last_words(int fd) {
    Header header{};
    EXPECT_EQ(recv(fd, &header, sizeof header, MSG_WAITALL), static_cast<ssize_t>(sizeof header));
    char rest[512];
    while (recv(fd, rest, sizeof rest, 0) > 0) {
    }
    return static_cast<Code>(header.status);
  }

  Fixture fixture_;
  Dispatcher dispatcher_{fixture_.manager, {{"posix:x"}}};
  std::string directory_, path_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
};

TEST_F(ServerTest, ServesAClient) {
  Client client(path_, "c", 10);
  EXPECT_EQ(client.generation(), 7u);
  const auto blocks = reserve(client, kA, 3);
  EXPECT_EQ(blocks.size(), 3u);
  EXPECT_NE(client.statistics().find("\"owned_pages\": 18"), std::string::npos);
  client.hand_off(kA, "k", blocks, blocks, 100);
  EXPECT_EQ(client.adopt(kA, "k"), blocks);
  EXPECT_EQ(refusal([&] { client.drop(kA, "k"); }), Code::kUnknownKey);
  release(client, kA, blocks);
  EXPECT_NE(client.statistics().find("\"owned_pages\": 0"), std::string::npos);
}

TEST_F(ServerTest, TellsOfARefusedPostLater) {
  Client client(path_, "c", 10);
  release(client, kA, {5});
  client.describe();  // meets the refusal, and is carried out
  EXPECT_EQ(refusal([&] { client.describe(); }), Code::kNotOwner);
  EXPECT_EQ(refusal([&] { client.describe(); }), Code::kOk);
}

TEST_F(ServerTest, ReleasesWhatADeadClientHeld) {
  {
    Client client(path_, "dying", 10);
    reserve(client, kA, 5);
  }
  Client other(path_, "other", 10);
  while (other.statistics().find("\"owned_pages\": 0") == std::string::npos) std::this_thread::yield();
}

TEST_F(ServerTest, ManyThreadsAtOnce) {
  std::atomic<int> granted{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      for (int life = 0; life < 4; ++life) {
        Client client(path_, "thread", 60);
        for (int round = 0; round < 50; ++round) {
          const auto model = static_cast<std::uint32_t>((i + round) % 2);
          const auto blocks = reserve(client, model, 2);
          granted += static_cast<int>(blocks.size());
          if (!blocks.empty() && round != 49) release(client, model, blocks);  // the last ones die with the client
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(granted, 0);
  Client client(path_, "last", 60);
  while (client.statistics().find("\"id\": 1") != std::string::npos) std::this_thread::yield();
  stop();
  EXPECT_EQ(fixture_.free_pages(), 100);
}

TEST_F(ServerTest, OneClientInManyThreads) {
  Client client(path_, "shared", 60);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        const auto blocks = reserve(client, kB, 1);
        if (!blocks.empty()) release(client, kB, blocks);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(client.statistics().find("\"held_pages\": 0"), std::string::npos);
}

TEST_F(ServerTest, AnswersGarbageAndCloses) {
  const int fd = connect_raw();
  const char garbage[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
  ASSERT_GT(send(fd, garbage, sizeof garbage, MSG_NOSIGNAL), 0);
  EXPECT_EQ(last_words(fd), Code::kBadMagic);
  close(fd);
}

TEST_F(ServerTest, RefusesOversizedMessagesWithoutReadingThem) {
  const int fd = connect_raw();
  Header header;
  header.length = kMaxPayload + 4;
  ASSERT_EQ(send(fd, &header, sizeof header, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof header));
  EXPECT_EQ(last_words(fd), Code::kTooLarge);
  close(fd);
}

TEST_F(ServerTest, TakesMessagesInAnyPieces) {
  const int fd = connect_raw();
  Bytes out;
  for (std::uint32_t i = 1; i <= 3; ++i) {
    Header header;
    header.operation = static_cast<std::uint16_t>(i == 1 ? Operation::kHello : Operation::kDescribe);
    header.generation = 7;
    header.sequence = i;
    FrameWriter frame(out, header);
    if (i == 1) frame.text("bytewise").u32(1);
    frame.finish();
  }
  for (const std::uint8_t byte : out) ASSERT_EQ(send(fd, &byte, 1, MSG_NOSIGNAL), 1);
  for (std::uint32_t i = 1; i <= 3; ++i) {
    Header header{};
    ASSERT_EQ(recv(fd, &header, sizeof header, MSG_WAITALL), static_cast<ssize_t>(sizeof header));
    EXPECT_EQ(header.sequence, i);
    EXPECT_EQ(header.status, 0u);
    Bytes payload(header.length);
    ASSERT_EQ(recv(fd, payload.data(), payload.size(), MSG_WAITALL), static_cast<ssize_t>(payload.size()));
  }
  close(fd);
}

TEST_F(ServerTest, CarriesOutLargeMessages) {
  Client client(path_, "large", 60);
  std::vector<Hash> hashes(100'000);
  const std::vector<std::uint32_t> lengths{100'000};
  StepRequest request;
  request.lookup_lengths = lengths;
  request.lookup_hashes = hashes;
  StepReply reply;
  client.step(request, reply);
  EXPECT_EQ(reply.hit_lengths, (std::vector<std::uint32_t>{0}));
  hashes.resize(300'000);
  const std::vector<std::uint32_t> more{300'000};
  request.lookup_lengths = more;
  request.lookup_hashes = hashes;
  EXPECT_EQ(refusal([&] { client.step(request, reply); }), Code::kTooLarge);
  EXPECT_EQ(reserve(client, kA, 1).size(), 1u);  // the connection still works
}

// Sends `count` requests for statistics, as far as they are taken within a second. False if the server has hung up.
bool ask_without_reading(int fd, int count) {
  Bytes many;
  for (int i = 0; i < count; ++i) {
    Header header;
    header.operation = static_cast<std::uint16_t>(Operation::kStatistics);
    header.generation = 7;
    FrameWriter(many, header).finish();
  }
  timeval limit{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  for (std::size_t sent = 0; sent < many.size();) {
    const ssize_t put = send(fd, many.data() + sent, many.size() - sent, MSG_NOSIGNAL);
    if (put < 0) return errno == EAGAIN;
    sent += static_cast<std::size_t>(put);
  }
  return true;
}

TEST_F(ServerTest, DropsAClientThatTakesNothing) {
  Limits limits;
  limits.stall_time = 50'000'000;
  restart(limits);
  const int fd = connect_raw("deaf");
  while (ask_without_reading(fd, 1000)) {
  }
  close(fd);
  Client client(path_, "other", 60);  // and the others are served
  EXPECT_EQ(reserve(client, kA, 1).size(), 1u);
}

TEST_F(ServerTest, KeepsLittleForAClientThatReadsSlowly) {
  const int fd = connect_raw("slow");
  // The replies to these are some 100 MB.
  std::thread asking([&] {
    for (int i = 0; i < 100 && ask_without_reading(fd, 1000); ++i) {
    }
  });
  Client other(path_, "other", 60);
  Bytes some(64 << 10);
  std::size_t most = 0, taken = 0;
  // On a busy machine it takes more, since each has less.
  for (int i = 0; i < 400 || taken <= (1u << 20); ++i) {
    const ssize_t got = recv(fd, some.data(), some.size(), 0);
    ASSERT_GT(got, 0);
    taken += static_cast<std::size_t>(got);
    other.describe();
    most = std::max(most, server_->buffered());
  }
  EXPECT_LT(most, 2u << 20);
  shutdown(fd, SHUT_RDWR);
  asking.join();
  close(fd);
}

TEST_F(ServerTest, AHeaderThatAnnouncesMegabytesCostsNothing) {
  std::vector<int> open;
  for (int i = 0; i < 60; ++i) {
    open.push_back(connect_raw("half"));
    Header header;
    header.operation = static_cast<std::uint16_t>(Operation::kStep);
    header.generation = 7;
    header.length = kMaxPayload;
    ASSERT_EQ(send(open.back(), &header, sizeof header, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof header));
  }
  Client client(path_, "other", 60);
  client.describe();  // the frames above have been read
  EXPECT_LT(server_->buffered(), 16u << 20);
  for (const int fd : open) close(fd);
}

TEST_F(ServerTest, ClosesTheLargestWhenBuffersGrowTogether) {
  Limits limits;
  limits.buffer_bytes = 8u << 20;
  restart(limits);
  std::vector<int> open;
  int hung_up = 0;
  const Bytes part(1 << 20);
  for (int i = 0; i < 20; ++i) {
    open.push_back(connect_raw("hoarder"));
    Header header;
    header.operation = static_cast<std::uint16_t>(Operation::kStep);
    header.generation = 7;
    header.length = kMaxPayload;
    EXPECT_EQ(send(open.back(), &header, sizeof header, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof header));
    if (send(open.back(), part.data(), part.size(), MSG_NOSIGNAL) < 0) ++hung_up;
  }
  Client client(path_, "other", 60);
  EXPECT_EQ(reserve(client, kA, 1).size(), 1u);
  EXPECT_LE(server_->buffered(), limits.buffer_bytes);
  for (const int fd : open) {
    char byte = 0;
    if (recv(fd, &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET) ++hung_up;
    close(fd);
  }
  EXPECT_GT(hung_up, 5);
}

TEST_F(ServerTest, OneFloodingClientDoesNotKeepTheOthersWaiting) {
  // Statistics of a thousand models are expensive: a buffer full of such requests is a second's work.
  stop();
  for (int i = 0; i < 500; ++i) fixture_.manager.add_model({"m" + std::to_string(i), "p", 1, 1, 4, 0});
  restart({});
  const int fd = connect_raw("flood");
  std::atomic<bool> done{false};
  std::thread reader([&] {
    Bytes some(1 << 20);
    while (recv(fd, some.data(), some.size(), 0) > 0) {
    }
  });
  std::thread asking([&] {
    while (!done && ask_without_reading(fd, 1000)) {
    }
  });
  Client client(path_, "other", 60);
  const std::int64_t begin = clock_now();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(reserve(client, kB, 1).size(), 1u);
  const std::int64_t each = (clock_now() - begin) / 20;
  done = true;
  shutdown(fd, SHUT_RDWR);
  asking.join();
  reader.join();
  close(fd);
  // A turn is one such request. Without turns each would wait for two thousand of them.
  const std::int64_t before = clock_now();
  client.statistics();
  EXPECT_LT(each, 200 * std::max<std::int64_t>(clock_now() - before, 100'000));
}

TEST_F(ServerTest, RefusesOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(chmod(directory_.c_str(), 0755), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);  // the file's mode keeps them out, too
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (setuid(65534) != 0) _exit(2);
    const int fd = connect_raw();
    Header header{};
    const bool told = recv(fd, &header, sizeof header, MSG_WAITALL) == static_cast<ssize_t>(sizeof header) &&
                      header.status == static_cast<std::uint32_t>(Code::kForbidden);
    char rest[512];
    while (recv(fd, rest, sizeof rest, 0) > 0) {
    }
    _exit(told ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// A client in a process of its own that holds three blocks of model a, until it is killed.
class OtherProcess {
 public:
  explicit OtherProcess(const std::string& path) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      Client client(path, "engine", 10);
      StepRequest request;
      request.model = kA;
      request.reserve = 3;
      StepReply reply;
      client.step(request, reply);
      if (write(ready[1], "x", 1) != 1) _exit(1);
      for (;;) pause();
    }
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
  }
  ~OtherProcess() { kill(); }

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
};

// Waits until model a holds so many pages; false if that takes too long.
bool until_used(Fixture& fixture, std::int64_t pages) {
  for (int i = 0; i < 3000; ++i) {
    if (fixture.used(kA) == pages) return true;
    usleep(10'000);
  }
  return false;
}

TEST_F(ServerTest, TheBlocksOfADeadClientAreKeptForWhatItHadLaunched) {
  Limits limits;
  limits.linger_time = 3'600'000'000'000;
  restart(limits);
  OtherProcess engine(path_);
  EXPECT_EQ(fixture_.used(kA), 18);
  engine.kill();
  // The server has seen its end when others have been served after it.
  for (int i = 0; i < 20; ++i) Client(path_, "other", 10).statistics();
  EXPECT_EQ(fixture_.used(kA), 18);
  stop();
  EXPECT_EQ(fixture_.used(kA), 0);
}

TEST_F(ServerTest, TheBlocksOfADeadClientComeBackInTheEnd) {
  Limits limits;
  limits.linger_time = 20'000'000;
  restart(limits);
  OtherProcess engine(path_);
  engine.kill();
  EXPECT_TRUE(until_used(fixture_, 0));
}

TEST_F(ServerTest, AClientThatLivesOnHasFinishedWhatItComputed) {
  Limits limits;
  limits.linger_time = 3'600'000'000'000;
  restart(limits);
  {
    Client client(path_, "engine", 10);
    EXPECT_EQ(reserve(client, kA, 3).size(), 3u);
  }
  EXPECT_TRUE(until_used(fixture_, 0));
}

TEST_F(ServerTest, StrangersDoNotKeepClientsOut) {
  std::vector<int> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(connect_raw());
  Client client(path_, "client", 60);
  EXPECT_EQ(reserve(client, kA, 1).size(), 1u);
  for (const int fd : strangers) close(fd);
}

TEST_F(ServerTest, OnlyOneListens) {
  Fixture other;
  Dispatcher dispatcher(other.manager, {});
  EXPECT_THROW(Server(dispatcher, path_), ServerError);
  EXPECT_THROW(Server(dispatcher, std::string(200, 'x')), ServerError);
  EXPECT_THROW(Server(dispatcher, directory_), ServerError);
  EXPECT_THROW(Server(dispatcher, directory_ + "/no/such"), ServerError);
  Client client(path_, "c", 10);
}

TEST_F(ServerTest, ClosingAClientEndsACallOfAnotherThread) {
  Client client(path_, "c", 60);
  std::atomic<bool> begun{false};
  std::thread caller([&] {
    EXPECT_THROW(
        while (true) {
          reserve(client, kA, 1);
          begun = true;
        },
        Gone);
  });
  while (!begun) std::this_thread::yield();
  client.close();
  caller.join();
}

TEST_F(ServerTest, ClientsNoticeItsEnd) {
  Client client(path_, "c", 10);
  stop();
  EXPECT_THROW(reserve(client, kA, 1), Gone);
  EXPECT_FALSE(client.connected());
  EXPECT_THROW(reserve(client, kA, 1), Gone);
  EXPECT_THROW(Client(path_, "c", 10), Gone);
}

TEST(Server, ReleasesExpiredHandOffsByItself) {
  char name[] = "/tmp/mux-memory-XXXXXX";
  const std::string directory = mkdtemp(name);
  Fixture fixture;
  Dispatcher dispatcher(fixture.manager, {});
  Server server(dispatcher, directory + "/s");
  std::thread thread([&] { server.run(); });
  {
    Client client(directory + "/s", "c", 60);
    StepRequest request;
    request.reserve = 2;
    StepReply reply;
    client.step(request, reply);
    client.hand_off(kA, "k", reply.reserved, reply.reserved, 0.01);
    // Nobody talks to the server now: it has to wake up by itself.
    while (load(fixture.segments.counters().models[kA].used_pages) != 0) std::this_thread::yield();
  }
  server.stop();
  thread.join();
  fixture.manager.check();
  unlink((directory + "/s").c_str());
  rmdir(directory.c_str());
}

TEST(Server, BeatsWhileNobodyAsks) {
  char name[] = "/tmp/mux-memory-XXXXXX";
  const std::string directory = mkdtemp(name);
  const std::string file = directory + "/beats/memory.beat";
  Fixture fixture;
  Dispatcher dispatcher(fixture.manager, {});
  const auto read = [&] {
    std::uint64_t beats = 0;
    std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(&beats), sizeof beats);
    return beats;
  };
  {
    Heartbeat heartbeat(file);
    const std::uint64_t first = read();
    EXPECT_GE(first, 1U);
    Server server(dispatcher, directory + "/s");
    server.beat_in(heartbeat);
    std::thread thread([&] { server.run(); });
    while (read() < first + 3) std::this_thread::yield();
    server.stop();
    thread.join();
  }
  // Who comes next goes on from there.
  const std::uint64_t last = read();
  Heartbeat next(file);
  EXPECT_GT(read(), last);
  // Without a place for it there is no heartbeat, and no harm.
  EXPECT_FALSE(Heartbeat(directory + "/no/such/place").watched());
  EXPECT_FALSE(Heartbeat("").watched());
  unlink(file.c_str());
  rmdir((directory + "/beats").c_str());
  rmdir(directory.c_str());
}

}  // namespace
}  // namespace muxserve::memory::testing
