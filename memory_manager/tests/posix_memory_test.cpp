#include "posix_memory.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "client/mapping.hpp"
#include "manager.hpp"

namespace muxserve::memory::testing {
namespace {

using std::chrono::milliseconds;

std::string fresh_prefix() {
  static std::atomic<int> count{0};
  return "muxserve-test-" + std::to_string(getpid()) + "-" + std::to_string(count++);
}

bool exists(const std::string& name) { return access(("/dev/shm/" + name).c_str(), F_OK) == 0; }

TEST(PosixSegments, KeepNamesAndMappingsOverARestart) {
  const std::string prefix = fresh_prefix();
  std::shared_ptr<Mapping> table, counters;
  {
    PosixSegments first(prefix, milliseconds(0));
    first.create_table(0, 100)[5] = 77;
    store(first.counters().pools[0].free_pages, 9);
    table = std::make_shared<Mapping>(first.table_name(0), 400, false);
    counters = std::make_shared<Mapping>(prefix + ".counters", sizeof(Counters), false);
    first.settled();
  }  // as if killed: nothing is removed
  EXPECT_EQ(static_cast<const std::int32_t*>(table->data())[5], 77);
  PosixSegments second(prefix, milliseconds(0));
  EXPECT_EQ(load(second.counters().pools[0].free_pages), 0);
  std::int32_t* again = second.create_table(0, 100);
  EXPECT_EQ(static_cast<const std::int32_t*>(table->data())[5], 0);
  again[6] = 88;
  EXPECT_EQ(static_cast<const std::int32_t*>(table->data())[6], 88);
  EXPECT_TRUE(table->current());
  second.counters().generation.store(5);
  EXPECT_EQ(CountersView(counters, 0, 0, 1, 2).generation(), 5u);
  second.remove_all();
  EXPECT_FALSE(table->current());
  EXPECT_EQ(CountersView(counters, 0, 0, 1, 2).generation(), 0u);
  EXPECT_FALSE(exists(prefix + ".counters"));
  EXPECT_FALSE(exists(prefix + ".guard"));
  EXPECT_FALSE(exists(prefix + ".table.0"));
}

TEST(PosixSegments, ReplaceATableOfAnotherSize) {
  const std::string prefix = fresh_prefix();
  PosixSegments segments(prefix, milliseconds(0));
  segments.create_table(0, 1000)[999] = 1;
  const Mapping old(segments.table_name(0), 4000, false);
  segments.create_table(0, 10);
  EXPECT_EQ(static_cast<const std::int32_t*>(old.data())[999], 1);  // still readable by who has it
  EXPECT_FALSE(old.current());
  EXPECT_THROW(Mapping(segments.table_name(0), 4000, false), MappingError);
  segments.remove_all();
}

TEST(PosixSegments, OneManagerAPrefix) {
  const std::string prefix = fresh_prefix();
  PosixSegments first(prefix, milliseconds(0));
  EXPECT_THROW(PosixSegments(prefix, milliseconds(0)), MemoryError);
  first.remove_all();
}

TEST(PosixSegments, RemoveWhatIsStale) {
  const std::string prefix = fresh_prefix();
  PosixSegments segments(prefix, milliseconds(0));
  segments.create_table(0, 10);
  const auto sparse = PosixSegment::Use::kSparse;
  PosixSegment stale_table(prefix + ".table.7", 64, sparse), stale_pool(prefix + ".pool.1", 64, sparse);
  PosixSegment pool(prefix + ".pool.0", 64, sparse);
  segments.remove_stale({pool_segment(prefix, 0, 0)});
  EXPECT_TRUE(exists(prefix + ".table.0"));
  EXPECT_TRUE(exists(prefix + ".pool.0"));
  EXPECT_FALSE(exists(prefix + ".table.7"));
  EXPECT_FALSE(exists(prefix + ".pool.1"));
  segments.remove_all();
  EXPECT_FALSE(exists(prefix + ".pool.0"));
}

TEST(PosixSegments, ANewManagerWaitsForWriters) {
  const std::string prefix = fresh_prefix();
  auto first = std::make_unique<PosixSegments>(prefix, milliseconds(0));
  first->counters().generation.store(1);
  first->settled();
  WriteGuard writer(prefix, 1);
  ASSERT_TRUE(writer.acquire());
  first.reset();  // the manager dies while the client writes
  EXPECT_THROW(PosixSegments(prefix, milliseconds(5)), MemoryError);
  std::atomic<bool> written{false};
  std::thread restart([&] {
    PosixSegments second(prefix, milliseconds(60'000));
    EXPECT_TRUE(written.load());
    second.counters().generation.store(2);
    second.settled();
  });
  written.store(true);
  writer.release();
  restart.join();
  EXPECT_FALSE(writer.acquire());  // its blocks are not its own any more
  WriteGuard next(prefix, 2);
  EXPECT_TRUE(next.acquire());
  next.release();
  PosixSegments third(prefix, milliseconds(0));
  third.remove_all();
}

TEST(PosixPoolMemory, RankZeroKeepsThePoolsName) {
  EXPECT_EQ(pool_segment("p", 3, 0), "p.pool.3");
  EXPECT_EQ(pool_segment("p", 3, 2), "p.pool.3.2");
}

TEST(PosixPoolMemory, IsSparseAndRemoved) {
  const std::string name = fresh_prefix() + ".pool.0";
  PosixPoolMemory pool(name, 64u << 20);
  EXPECT_EQ(pool.handle(), "posix:" + name);
  struct stat status{};
  ASSERT_EQ(stat(("/dev/shm/" + name).c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 64 << 20);
  EXPECT_EQ(status.st_blocks, 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  Mapping mapping(name, 64u << 20, true);
  const long page = sysconf(_SC_PAGESIZE);
  static_cast<char*>(mapping.data())[page] = 1;
  ASSERT_EQ(stat(("/dev/shm/" + name).c_str(), &status), 0);
  EXPECT_GT(status.st_blocks, 0);
  EXPECT_LE(status.st_blocks * 512, page);
  pool.destroy();
  EXPECT_FALSE(exists(name));
}

TEST(PosixSegments, ReserveTheMemoryOfTablesAndCounters) {
  const std::string prefix = fresh_prefix();
  PosixSegments segments(prefix, milliseconds(0));
  segments.create_table(0, 100'000);
  // Memory that is not there when the segment is made is a SIGBUS when /dev/shm is full later.
  for (const std::string& name : {segments.table_name(0), prefix + ".counters"}) {
    struct stat status{};
    ASSERT_EQ(stat(("/dev/shm/" + name).c_str(), &status), 0);
    EXPECT_GE(status.st_blocks * 512, status.st_size) << name;
  }
  segments.remove_all();
}

// Runs `body` in a process of its own, in which no file can grow beyond 1 MiB.
template <class Body>
void with_small_files(Body body) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    _exit(setrlimit(RLIMIT_FSIZE, &limit) == 0 && body() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(PosixSegments, ATableThatCannotBeMadeIsRefusedAndLeavesNothing) {
  with_small_files([] {
    const std::string prefix = fresh_prefix() + "-small";
    PosixSegments segments(prefix, milliseconds(0));
    Config config;
    config.prefix = prefix;
    config.pools = {{"p", 64, 1'000'001}};
    config.models = {{"a", "p", 1, 1, 100, 100}};
    Manager manager(config, segments, 7);
    std::string words;
    try {
      manager.add_model({"large", "p", 1, 1, 1'000'000, 100});
    } catch (const Refused& refused) {
      if (refused.code() == Code::kNoMemory) words = refused.what();
    }
    const bool told = words.find("\"large\" was not added: cannot make shared memory") != std::string::npos;
    const bool nothing_left = !exists(prefix + ".table.1");
    const bool serves = manager.add_model({"small", "p", 1, 1, 1000, 100}) == 1;
    manager.check();
    segments.remove_all();
    return told && nothing_left && serves;
  });
}

TEST(CheckSharedMemory, CountsEverythingTogether) {
  const std::string name = fresh_prefix() + ".pool.0";
  struct statvfs fs{};
  ASSERT_EQ(statvfs("/dev/shm", &fs), 0);
  const std::size_t left = fs.f_bavail * fs.f_frsize;
  check_shared_memory({{name, left / 4}, {name + ".1", left / 4}});
  try {
    check_shared_memory({{name, left / 4 * 3}, {name + ".1", left / 4 * 3}});
    FAIL();
  } catch (const MemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("make the pools smaller"), std::string::npos) << error.what();
  }
}

TEST(CountersView, CountsAvailableBlocks) {
  const std::string prefix = fresh_prefix();
  PosixSegments segments(prefix, milliseconds(0));
  Counters& counters = segments.counters();
  auto mapping = std::make_shared<Mapping>(prefix + ".counters", sizeof(Counters), false);
  const CountersView view(mapping, 1, 3, 10, 21);
  const auto set = [&](std::int64_t free, std::int64_t cached, std::int64_t used, std::int64_t quota) {
    store(counters.pools[1].free_pages, free);
    store(counters.pools[1].cached_pages, cached);
    store(counters.models[3].used_pages, used);
    store(counters.models[3].quota_pages, quota);
    return view.available_blocks();
  };
  EXPECT_EQ(set(100, 55, 0, 1000), 15);   // the pool
  EXPECT_EQ(set(1000, 0, 40, 99), 5);     // the quota
  EXPECT_EQ(set(1000, 0, 100, 50), 0);    // over a lowered quota
  EXPECT_EQ(set(9999, 0, 190, 9999), 1);  // the block ids
  EXPECT_THROW(CountersView(mapping, kMaxPools, 0, 1, 1), MappingError);
  segments.remove_all();
}

}  // namespace
}  // namespace muxserve::memory::testing
