// Chunks: pools that give memory back and take it again.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <stdexcept>

#include "fuzz.hpp"
#include "manager.hpp"
#include "support.hpp"

namespace muxserve::memory::testing {
namespace {

using Blocks = std::vector<std::int32_t>;

constexpr std::uint32_t kW = 2;
constexpr std::int64_t kPages = 32;

// Chunks of two pages. Blocks of model "a" have 2 pages, those of "b" one; the second layer of "w" sees a window of one
// block.
Config chunked() {
  Config config;
  config.prefix = "muxserve-test";
  config.pools = {{"p", 64, kPages, 128}};
  config.models = {{"a", "p", 1, 2, 20, 16}, {"b", "p", 1, 1, 40, 8}, {"w", "p", 2, 1, 20, 8, {1}, 1}};
  return config;
}

// Knows which pages have memory. It has memory for `left` chunks more.
struct Memory : ChunkMemory {
  void give_back(std::uint32_t, std::int64_t first_page, std::int64_t pages) noexcept override {
    // At the start a manager gives back what one before it may have left.
    if (started) change(first_page, pages, false);
  }
  void take_again(std::uint32_t, std::int64_t first_page, std::int64_t pages) override {
    started = true;
    if (left-- <= 0) throw std::runtime_error("the device has no memory left");
    change(first_page, pages, true);
  }
  void change(std::int64_t first_page, std::int64_t pages, bool to) {
    for (std::int64_t page = first_page; page < first_page + pages; ++page) {
      twice |= backed[static_cast<std::size_t>(page)] == to;
      backed[static_cast<std::size_t>(page)] = to;
    }
  }

  std::vector<bool> backed = std::vector<bool>(kPages, false);
  bool started = false, twice = false;
  int left = 1 << 30;
};

struct Chunked : Memory, Fixture {
  explicit Chunked(const Config& config = chunked()) : Fixture(config, this), client(manager.connect("c", 1)) {}

  std::int64_t room() { return load(segments.counters().pools[0].room_pages); }
  std::int64_t backed_pages() { return load(segments.counters().pools[0].backed_pages); }

  // What holds at any time: what is in use or cached has memory, and the counters say what has.
  void check() {
    manager.check();
    EXPECT_FALSE(twice);
    EXPECT_EQ(std::count(backed.begin(), backed.end(), true), backed_pages());
    EXPECT_TRUE(backed[0]);
    std::vector<PageUse> uses(kPages, PageUse::kNone);
    for (std::uint32_t model : {kA, kB, kW}) manager.model(model).mark(uses);
    for (std::size_t page = 0; page < uses.size(); ++page)
      EXPECT_TRUE(uses[page] == PageUse::kNone || backed[page]) << "page " << page << " is in use without memory";
  }

  int client;
};

TEST(Chunks, GiveBackWhatIsFree) {
  Chunked f;
  EXPECT_EQ(f.room(), kPages);
  f.manager.set_room(0, 15);  // rounded up
  EXPECT_EQ(f.room(), 16);
  EXPECT_EQ(f.backed_pages(), 16);
  EXPECT_EQ(f.free_pages(), 15);
  f.check();
  EXPECT_EQ(f.reserve(f.client, kA, 8, true).size(), 7u);
  f.check();
  f.manager.set_room(0, kPages);
  EXPECT_EQ(f.backed_pages(), kPages);
  EXPECT_EQ(f.free_pages(), 17);
  f.check();
}

TEST(Chunks, APoolMayStartWithFewOfThem) {
  Config config = chunked();
  config.pools[0].start_pages = 5;
  Chunked f(config);
  EXPECT_EQ(f.room(), 6);
  EXPECT_EQ(f.free_pages(), 5);
  EXPECT_EQ(f.reserve(f.client, kB, 8, true).size(), 5u);
  f.check();
  f.manager.set_room(0, kPages);
  EXPECT_EQ(f.free_pages(), 26);
  f.check();
}

TEST(Chunks, EndWhereMemoryCanBeCut) {
  const auto pages = [](std::int64_t page_bytes, std::int64_t chunk_bytes) {
    return PoolConfig{"p", page_bytes, 1'000'000, chunk_bytes}.pages_of_a_chunk();
  };
  EXPECT_EQ(pages(16 << 10, 2 << 20), 128);
  EXPECT_EQ(pages(36 << 10, 2 << 20), 512);  // 18 MiB
  EXPECT_EQ(pages(4 << 20, 2 << 20), 1);
  EXPECT_EQ(pages(64, 0), 1'000'000);  // the pool is one chunk
}

TEST(Chunks, APoolInOnePieceStays) {
  Config config = chunked();
  config.pools[0].chunk_bytes = 0;
  Chunked f(config);
  f.manager.set_room(0, 1);
  EXPECT_EQ(f.room(), kPages);
  f.check();
}

TEST(Chunks, TheNullPageStays) {
  Chunked f;
  f.manager.set_room(0, 1);
  EXPECT_EQ(f.room(), 2);
  EXPECT_EQ(f.free_pages(), 1);
  f.check();
}

TEST(Chunks, WaitForPagesInUse) {
  Chunked f;
  const Blocks blocks = f.reserve(f.client, kA, 8), others = f.reserve(f.client, kB, 8);
  f.manager.set_room(0, 2);
  EXPECT_EQ(f.room(), 2);
  EXPECT_EQ(f.backed_pages(), 26);  // the null page's chunk, and those of 24 pages but the one that is in there
  EXPECT_TRUE(f.reserve(f.client, kW, 1, true).empty());
  f.check();
  f.release(f.client, kA, blocks);
  f.check();
  EXPECT_LE(f.backed_pages(), 12);
  EXPECT_EQ(f.room(), 2);
  f.manager.disconnect(f.client);  // as if it had died
  EXPECT_EQ(f.backed_pages(), 2);
  f.check();
}

TEST(Chunks, ThoseWithFewestPagesInUseAreVacated) {
  Chunked f;
  const Blocks blocks = f.reserve(f.client, kB, 5);
  f.manager.set_room(0, 6);  // the null page and five
  EXPECT_EQ(f.backed_pages(), 6);
  EXPECT_EQ(f.used(kB), 5);
  f.check();
}

TEST(Chunks, CachedBlocksMakeRoom) {
  Chunked f;
  const Blocks blocks = f.reserve(f.client, kB, 8);
  f.publish(f.client, kB, blocks, {1, 2, 3, 4, 5, 6, 7, 8}, blocks);
  f.manager.set_room(0, 10);
  EXPECT_EQ(f.cached(kB), 8);  // free chunks go first
  f.check();
  f.manager.set_room(0, 4);
  EXPECT_EQ(f.backed_pages(), 4);
  EXPECT_LE(f.cached(kB), 3);
  EXPECT_GE(f.statistics(kB).evictions, 5);
  f.check();
}

TEST(Chunks, NothingIsCachedInAVacatedChunk) {
  Chunked f;
  const Blocks blocks = f.reserve(f.client, kB, 8);
  f.publish(f.client, kB, blocks, {1, 2, 3, 4, 5, 6, 7, 8});
  f.manager.set_room(0, 2);
  f.release(f.client, kB, blocks);
  EXPECT_EQ(f.backed_pages(), 2);
  EXPECT_EQ(f.cached(kB), 1);  // in the chunk of the null page
  f.check();
}

TEST(Chunks, WindowsAsWell) {
  Chunked f;
  const Blocks blocks = f.reserve(f.client, kW, 4);
  f.publish(f.client, kW, blocks, {1, 2, 3, 4});
  f.manager.leave_window(f.client, kW, Span<std::int32_t>(blocks).first(2));
  f.check();
  f.manager.set_room(0, 2);
  f.check();
  f.manager.leave_window(f.client, kW, Span<std::int32_t>(blocks.data() + 2, 2));
  f.check();
  f.release(f.client, kW, blocks);
  EXPECT_EQ(f.backed_pages(), 2);
  f.check();
}

TEST(Chunks, VacatedOnesAreUsedAgainFirst) {
  Chunked f;
  const Blocks blocks = f.reserve(f.client, kA, 8);
  f.manager.set_room(0, 2);
  const std::int64_t backed = f.backed_pages();
  f.left = 0;  // no memory for others
  f.manager.set_room(0, backed);
  EXPECT_EQ(f.room(), backed);
  f.check();
  f.release(f.client, kA, blocks);
  EXPECT_EQ(f.backed_pages(), backed);
  EXPECT_EQ(f.free_pages(), backed - 1);
  f.check();
}

TEST(Chunks, MemoryMayBeMissing) {
  Chunked f;
  f.manager.set_room(0, 2);
  f.left = 3;
  EXPECT_EQ(refusal([&] { f.manager.set_room(0, kPages); }), Code::kNoMemory);
  EXPECT_EQ(f.room(), 8);
  EXPECT_EQ(f.free_pages(), 7);
  f.check();
}

TEST(Chunks, WrongRoomsAreRefused) {
  Chunked f;
  for (const auto& [pool, pages] : std::vector<std::pair<std::uint32_t, std::int64_t>>{
           {1, 4}, {0, 0}, {0, -1}, {0, kPages + 1}, {1u << 31, 4}, {0, INT64_MAX}})
    EXPECT_EQ(refusal([&, pool = pool, pages = pages] { f.manager.set_room(pool, pages); }), Code::kInvalid);
  EXPECT_EQ(f.room(), kPages);
}

// Random histories of two clients, one of which dies at times, while the pool gives and takes memory that may be
// missing: at no moment is a page in use without memory, and all sums agree.
TEST(Chunks, NoPageInUseLosesItsMemory) {
  for_each_seed(60, [](std::uint32_t seed) {
    Chunked f;
    std::mt19937 random(seed);
    const auto pick = [&](std::uint32_t below) { return static_cast<std::uint32_t>(random() % below); };
    int clients[] = {f.client, f.manager.connect("d", 2)};
    std::vector<Blocks> held[] = {std::vector<Blocks>(3), std::vector<Blocks>(3)};
    std::int64_t now = 0;
    std::uint32_t keys = 0;
    for (int step = 0; step < 300; ++step) {
      const std::uint32_t who = pick(2), model = pick(3);
      Blocks& mine = held[who][model];
      const auto some = [&] {
        Blocks chosen;
        for (const std::int32_t id : mine)
          if (pick(2) == 0) chosen.push_back(id);
        return chosen;
      };
      const auto forget = [&](const Blocks& gone) {
        for (const std::int32_t id : gone) mine.erase(std::find(mine.begin(), mine.end(), id));
      };
      const auto keep = [&](const Blocks& more) {
        for (const std::int32_t id : more)
          if (std::find(mine.begin(), mine.end(), id) == mine.end()) mine.push_back(id);
      };
      switch (pick(11)) {
        case 0:
        case 1:
          keep(f.reserve(clients[who], model, pick(5), true));
          break;
        case 2: {
          const Blocks gone = some();
          f.release(clients[who], model, gone);
          forget(gone);
          break;
        }
        case 3: {
          const Blocks blocks = some();
          std::vector<std::uint32_t> numbers;
          for (std::size_t i = 0; i < blocks.size(); ++i) numbers.push_back(pick(30));
          f.publish(clients[who], model, blocks, numbers);
          break;
        }
        case 4:
          keep(f.look_up(clients[who], model, {pick(30), pick(30)}));
          break;
        case 5: {
          const Blocks gone = some();
          if (gone.empty()) break;
          f.manager.hand_off(clients[who], model, std::to_string(++keys), gone, gone, 20, now);
          forget(gone);
          break;
        }
        case 6: {
          const std::vector<std::string> waiting = f.manager.model(model).hand_offs().keys();
          if (!waiting.empty()) keep(f.manager.adopt(clients[who], model, waiting.front()));
          break;
        }
        case 7:
          f.manager.expire(now += pick(10));
          break;
        case 8:
          if (model == kW) f.manager.leave_window(clients[who], kW, some());
          break;
        case 9:
          f.left = pick(4) == 0 ? static_cast<int>(pick(4)) : 1 << 30;
          refusal([&] { f.manager.set_room(0, 1 + pick(kPages)); });
          break;
        case 10:
          if (pick(5) != 0) break;
          f.manager.disconnect(clients[who]);
          clients[who] = f.manager.connect("again", 3);
          held[who] = std::vector<Blocks>(3);
          break;
      }
      f.check();
    }
    // Everybody goes: what is left is what there is room for.
    for (const int client : clients) f.manager.disconnect(client);
    f.manager.expire(now + 100);
    f.manager.set_room(0, 1);
    EXPECT_EQ(f.backed_pages(), 2);
    f.check();
  });
}

}  // namespace
}  // namespace muxserve::memory::testing
