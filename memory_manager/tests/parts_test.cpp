// Page pool, prefix index, hand-offs, configuration, JSON.
#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <random>
#include <unordered_map>

#include "adaptive_spin.hpp"
#include "config.hpp"
#include "hand_off.hpp"
#include "json.hpp"
#include "page_pool.hpp"
#include "prefix_index.hpp"
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

TEST(Json, ReadsWhatIsWritten) {
  json::Writer out;
  out.open_object().member("text", "a \"b\" \\ \n \x01 \xC3\xA9").member("number", -5);
  out.key("list").open_array().value(std::int64_t{1}).open_object().close_object().value("x").close_array();
  out.member("last", std::int64_t{1} << 62).close_object();
  const json::Value value = json::parse(out.text());
  const json::Object& object = *value.object();
  EXPECT_EQ(*object[0].second.string(), "a \"b\" \\ \n \x01 \xC3\xA9");
  EXPECT_EQ(*object[1].second.integer(), -5);
  EXPECT_EQ(object[2].second.array()->size(), 3u);
  EXPECT_EQ(*object[3].second.integer(), std::int64_t{1} << 62);
}

TEST(Json, ReadsEscapes) {
  EXPECT_EQ(*json::parse(R"("\u00e9\ud83d\ude00\t\/\b\f\r")").string(), "\xC3\xA9\xF0\x9F\x98\x80\t/\b\f\r");
}

TEST(Json, SaysWhereItIsWrong) {
  for (const char* text :
       {"", "{", "[1,", "{\"a\" 1}", "{\"a\": 1,}", "[1 2]", "nul", "\"abc", "\"\\q\"", "\"\\ud800\"", "\"\\u12g4\"",
        "1 2", "99999999999999999999", "--1", "1e999", "{\"a\": 1, \"a\": 2}", "\"\n\"", "\"\\udc00\""}) {
    EXPECT_THROW(json::parse(text), json::ParseError) << text;
  }
  EXPECT_THROW(json::parse(std::string(100, '[')), json::ParseError);
  EXPECT_THROW(json::parse(std::string("[1\0]", 4)), json::ParseError);
  try {
    json::parse("{\n  \"a\": oops\n}");
    FAIL();
  } catch (const json::ParseError& error) {
    EXPECT_NE(std::string(error.what()).find("line 2, column 8"), std::string::npos) << error.what();
  }
}

std::string config_text(const std::string& model_extra = "", std::int64_t quota = 60) {
  return R"({"prefix": "x", "pools": [{"name": "p", "page_bytes": 64, "num_pages": 101}], "models": [{"name": "a",)"
         R"("pool": "p", "layers": 2, "kv_heads": 3, "num_blocks": 20, "quota_pages": )" +
         std::to_string(quota) + model_extra + "}]}";
}

TEST(Config, IsRead) {
  const Config config = parse_config(config_text());
  EXPECT_EQ(config.prefix, "x");
  EXPECT_EQ(config.pools[0].num_pages, 101);
  EXPECT_EQ(config.models[0].pages_per_block(), 6);
}

TEST(Config, ComplainsInWords) {
  const auto words = [](const std::string& text) -> std::string {
    try {
      parse_config(text);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto expect = [&](const std::string& text, const std::string& part) {
    EXPECT_NE(words(text).find(part), std::string::npos) << words(text);
  };
  expect("[]", "expected an object");
  expect("{", "line 1");
  expect(config_text(R"(, "color": 1)"), "models[0]: unknown key \"color\"");
  expect(config_text("", 200), "sum to 200 pages");
  expect(config_text("", -1), "quota_pages: -1 is not between");
  expect(R"({"prefix": "a/b", "pools": [{"name": "p", "page_bytes": 1, "num_pages": 2}], "models": []})", "prefix");
  expect(R"({"prefix": "a", "pools": [], "models": []})", "at least one pool");
  expect(R"({"prefix": "a", "pools": [{"name": "p", "page_bytes": 1}], "models": []})", "\"num_pages\" is missing");
  expect(R"({"prefix": "a", "pools": [{"name": "p", "page_bytes": "1", "num_pages": 2}], "models": []})",
         "pools[0].page_bytes: expected a whole number");
  expect(R"({"prefix": "a", "pools": [{"name": "p", "page_bytes": 1, "num_pages": 1}], "models": []})", "num_pages: 1");
  expect(
      R"({"prefix": "a", "pools": [{"name": "p", "page_bytes": 99999999999, "num_pages": 999999999}], "models": []})",
      "address");
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
