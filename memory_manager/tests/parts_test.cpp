// Page pool, prefix index, hand-offs, configuration, JSON.
#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <unordered_map>

#include "adaptive_spin.hpp"
#include "config.hpp"
#include "hand_off.hpp"
#include "json.hpp"
#include "page_pool.hpp"
#include "prefix_index.hpp"
#include "protocol.hpp"
#include "support.hpp"

namespace muxserve::memory::testing {
namespace {

TEST(PagePool, GivesEveryPageButTheNullPageOnce) {
  PoolCounters counters{};
  PagePool pool({"p", 1, 11}, counters);
  std::vector<std::int32_t> pages(10);
  pool.take(pages.data(), 4);
  pool.take(pages.data() + 4, 6);
  EXPECT_EQ(pool.free_pages(), 0);
  std::vector<std::int32_t> sorted = pages;
  std::sort(sorted.begin(), sorted.end());
  for (std::int32_t i = 0; i < 10; ++i) EXPECT_EQ(sorted[static_cast<std::size_t>(i)], i + 1);
  pool.give(pages.data(), 10);
  EXPECT_EQ(pool.free_pages(), 10);
}

TEST(PagePool, StartsWithLowPages) {
  PoolCounters counters{};
  PagePool pool({"p", 1, 1000}, counters);
  std::vector<std::int32_t> pages(8);
  pool.take(pages.data(), 8);
  for (const std::int32_t page : pages) EXPECT_LE(page, 8);
  EXPECT_EQ(load(counters.free_pages), 999);
}

TEST(PrefixIndex, BehavesLikeAMap) {
  // Few blocks and few different first bytes: long probe runs, and runs that wrap around the end.
  PrefixIndex index(64, 99);
  std::unordered_map<std::uint32_t, std::int32_t> by_hash;
  std::unordered_map<std::int32_t, std::uint32_t> by_block;
  std::mt19937 random(5);
  for (int i = 0; i < 50000; ++i) {
    const auto block = static_cast<std::int32_t>(1 + random() % 63);
    const auto number = static_cast<std::uint32_t>(random() % 100);
    if (random() % 2 == 0) {
      index.insert(block, hash_of(number));
      if (by_block.count(block) == 0 && by_hash.count(number) == 0) {
        by_block[block] = number;
        by_hash[number] = block;
      }
    } else if (by_block.count(block) != 0) {
      index.erase(block);
      by_hash.erase(by_block[block]);
      by_block.erase(block);
    }
    const auto expected = by_hash.find(number);
    ASSERT_EQ(index.find(hash_of(number)), expected == by_hash.end() ? -1 : expected->second);
    ASSERT_EQ(index.contains(block), by_block.count(block) != 0);
    ASSERT_EQ(index.size(), static_cast<std::int64_t>(by_block.size()));
  }
}

TEST(PrefixIndex, UsesEveryByteOfAHash) {
  PrefixIndex index(1000, 1);
  for (std::int32_t byte = 0; byte < 32; ++byte) {
    Hash hash{};
    hash[static_cast<std::size_t>(byte)] = 1;
    index.insert(byte + 1, hash);
  }
  EXPECT_EQ(index.size(), 32);
}

TEST(AdaptiveSpin, GivesUpMoreAndMoreWhereItFindsNothing) {
  AdaptiveSpin spin;
  const auto skipped = [&] {
    int count = 0;
    while (!spin.worth_it(0)) ++count;
    return count;
  };
  EXPECT_EQ(skipped(), 0);
  spin.found(true);
  spin.found(false);
  spin.found(false);
  EXPECT_EQ(skipped(), 0);  // may be chance
  int longest = 0;
  for (int i = 0; i < 20; ++i) {
    spin.found(false);
    const int count = skipped();
    EXPECT_GE(count, longest);
    longest = count;
  }
  EXPECT_GT(longest, 100);
  spin.found(true);
  spin.found(false);
  EXPECT_EQ(skipped(), 0);
}

TEST(AdaptiveSpin, NeverKeepsTheOtherSideFromItsCore) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);  // or the test itself may move
  AdaptiveSpin spin;
  EXPECT_FALSE(spin.worth_it(this_core()));
  EXPECT_TRUE(spin.worth_it(this_core() + 1));
  sched_setaffinity(0, sizeof before, &before);
}

TEST(HandOffs, AreTakenByKeyOrByTime) {
  HandOffs hand_offs;
  EXPECT_FALSE(hand_offs.take_expired(kNever));
  hand_offs.add("b", {2}, 20, 0);
  hand_offs.add("a", {1}, 10, 0);
  hand_offs.add("c", {3}, 20, 0);
  EXPECT_EQ(hand_offs.next_deadline(), 10);
  EXPECT_FALSE(hand_offs.take_expired(9));
  EXPECT_EQ(*hand_offs.take_expired(15), (std::vector<std::int32_t>{1}));
  EXPECT_FALSE(hand_offs.take_expired(15));
  EXPECT_EQ(*hand_offs.take("c"), (std::vector<std::int32_t>{3}));
  EXPECT_FALSE(hand_offs.take("c"));
  EXPECT_EQ(*hand_offs.take_expired(20), (std::vector<std::int32_t>{2}));
  EXPECT_EQ(hand_offs.next_deadline(), kNever);
  EXPECT_EQ(hand_offs.size(), 0u);
}

TEST(Json, IsWritten) {
  json::Writer out;
  out.open_object().member("text", "a \"b\" \\ \n \x01 \xC3\xA9").member("number", -5);
  out.key("list").open_array().value(std::int64_t{1}).open_object().close_object().value("x").close_array();
  out.member("last", std::int64_t{1} << 62).close_object();
  EXPECT_EQ(out.text(),
            "{\"text\": \"a \\\"b\\\" \\\\ \\u000a \\u0001 \xC3\xA9\", \"number\": -5, "
            "\"list\": [1, {}, \"x\"], \"last\": 4611686018427387904}");
}

TEST(Config, IsDecodedAsItWasEncoded) {
  Config config;
  config.prefix = "x";
  config.ranks = 2;
  config.device = "cuda";
  config.devices = {"GPU-a", "GPU-b"};
  config.ipc = "vmm";
  config.pools = {{"p", 64, 101}, {"q", 4096, 30}};
  config.models = {{"a", "p", 2, 3, 20, 60, {0, 1}, 4}, {"modèle", "q", 1, 2, 40, 29}};
  const Config again = decode_config(encode_config(config));
  EXPECT_EQ(again.prefix, "x");
  EXPECT_EQ(again.ranks, 2);
  EXPECT_EQ(again.device, "cuda");
  EXPECT_EQ(again.devices, config.devices);
  EXPECT_EQ(again.ipc, "vmm");
  ASSERT_EQ(again.pools.size(), 2u);
  EXPECT_EQ(again.pools[1].name, "q");
  EXPECT_EQ(again.pools[1].page_bytes, 4096);
  EXPECT_EQ(again.pools[1].num_pages, 30);
  ASSERT_EQ(again.models.size(), 2u);
  const ModelConfig& first = again.models[0];
  EXPECT_EQ(first.name, "a");
  EXPECT_EQ(first.pool, "p");
  EXPECT_EQ(first.layers, 2);
  EXPECT_EQ(first.kv_heads, 3);
  EXPECT_EQ(first.num_blocks, 20);
  EXPECT_EQ(first.quota_pages, 60);
  EXPECT_EQ(first.windowed_layers, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(first.window_blocks, 4);
  EXPECT_EQ(again.models[1].name, "modèle");
  check_config(again);
}

std::string complaint_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Config, SaysWhyAFileIsNone) {
  const auto expect = [](const std::function<void(Bytes&)>& change, const std::string& part) {
    Bytes file = encode_config(small_config());
    change(file);
    const std::string words = complaint_of([&] { decode_config(file); });
    EXPECT_NE(words.find(part), std::string::npos) << words;
  };
  const auto header = [](const std::function<void(Header&)>& change) {
    return [change](Bytes& file) {
      Header changed;
      std::memcpy(&changed, file.data(), sizeof changed);
      change(changed);
      std::memcpy(file.data(), &changed, sizeof changed);
    };
  };
  expect([](Bytes& file) { file.clear(); }, "too short");
  expect([](Bytes& file) { file[0] = '{'; }, "no configuration of a memory manager");
  expect(header([](Header& h) { h.operation = 10; }), "no configuration of a memory manager");
  expect(header([](Header& h) { h.version = kVersion + 1; }), "version " + std::to_string(kVersion + 1));
  expect(header([](Header& h) { h.length += 4; }), "behind its header");
  expect([](Bytes& file) { file.resize(file.size() + 4); }, "behind its header");
  expect(
      [&](Bytes& file) {
        file.resize(file.size() - 4);
        header([](Header& h) { h.length -= 4; })(file);
      },
      "ends too early");
  expect(
      [&](Bytes& file) {
        file.resize(file.size() + 4);
        header([](Header& h) { h.length += 4; })(file);
      },
      "too long");
}

TEST(Config, ComplainsInWords) {
  const auto expect = [](const std::function<void(Config&)>& change, const std::string& part) {
    Config config = small_config();
    change(config);
    const std::string words = complaint_of([&] { check_config(config); });
    EXPECT_NE(words.find(part), std::string::npos) << words;
  };
  expect([](Config& c) { c.models[0].quota_pages = 200; }, "sum to 240 pages");
  expect([](Config& c) { c.models[0].quota_pages = -1; }, "model \"a\": quota_pages: -1 is not between");
  expect([](Config& c) { c.models[0].windowed_layers = {2}; }, "windowed_layers, ascending: 2 is not between 0 and 1");
  expect([](Config& c) { c.prefix = "a/b"; }, "prefix");
  expect([](Config& c) { c.prefix.clear(); }, "prefix");
  expect([](Config& c) { c.ranks = 65; }, "ranks: 65 is not between 1 and 64");
  expect([](Config& c) { c.device = "tpu"; }, "device: \"posix\" or \"cuda\" is needed, got \"tpu\"");
  expect([](Config& c) { c.device = "cuda"; }, "devices: 1 are needed");
  expect([](Config& c) { c.ipc = "mmap"; }, "ipc: \"auto\", \"vmm\" or \"legacy\" is needed");
  expect([](Config& c) { c.pools.clear(); }, "at least one pool");
  expect([](Config& c) { c.pools[0].num_pages = 1; }, "num_pages: 1");
  expect([](Config& c) { c.pools[0] = {"p", 99'999'999'999, 999'999'999}; }, "address");
}

TEST(Config, RefusesModelsThatDoNotFit) {
  const auto refused = [](const std::function<void(Config&)>& change) {
    Config config = small_config();
    change(config);
    EXPECT_THROW(check_config(config), ConfigError);
  };
  refused([](Config& c) { c.models[0].pool = "q"; });
  refused([](Config& c) { c.models[1].name = "a"; });
  refused([](Config& c) { c.models[0].name = ""; });
  refused([](Config& c) { c.models[0].name = std::string(129, 'x'); });
  refused([](Config& c) { c.models[0].num_blocks = 1; });
  refused([](Config& c) { c.models[0].num_blocks = kMaxBlocks + 1; });
  refused([](Config& c) { c.models[0].layers = c.models[0].kv_heads = 1 << 20; });
  refused([](Config& c) { c.pools.push_back(c.pools[0]); });
  refused([](Config& c) { c.pools.resize(65, c.pools[0]); });
}

}  // namespace
}  // namespace muxserve::memory::testing
