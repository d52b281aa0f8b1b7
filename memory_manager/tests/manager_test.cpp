#include "manager.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "support.hpp"

namespace muxserve::memory::testing {
namespace {

using Blocks = std::vector<std::int32_t>;

TEST(Manager, ReservesBlocksWithPagesOfTheirOwn) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 3);
  ASSERT_EQ(blocks.size(), 3u);
  std::set<std::int32_t> pages;
  const ModelTable& table = f.manager.model(kA);
  for (const std::int32_t id : blocks) {
    EXPECT_GT(id, 0);
    pages.insert(table.table() + id * 6, table.table() + (id + 1) * 6);
  }
  EXPECT_EQ(pages.size(), 18u);
  EXPECT_EQ(pages.count(0), 0u);
  EXPECT_EQ(f.free_pages(), 82);
  EXPECT_EQ(f.used(kA), 18);
  f.manager.check();
  f.release(client, kA, blocks);
  EXPECT_EQ(f.free_pages(), 100);
  EXPECT_EQ(f.used(kA), 0);
  f.manager.check();
}

TEST(Manager, NullBlockPointsAtTheNullPage) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  f.reserve(client, kA, 10);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(f.manager.model(kA).table()[i], 0);
}

TEST(Manager, ReserveIsAllOrNothingUnlessPartial) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  EXPECT_TRUE(f.reserve(client, kA, 11).empty());
  EXPECT_EQ(f.used(kA), 0);
  EXPECT_EQ(f.reserve(client, kA, 11, true).size(), 10u);  // the quota: 60 pages
  EXPECT_TRUE(f.reserve(client, kA, 1, true).empty());
  EXPECT_EQ(f.reserve(client, kB, 100, true).size(), 20u);
  EXPECT_EQ(f.free_pages(), 0);
  f.manager.check();
}

TEST(Manager, BlockIdsBoundReservationsToo) {
  Config config = small_config();
  config.models[1].num_blocks = 5;
  Fixture f(config);
  const int client = f.manager.connect("c", 1);
  EXPECT_EQ(f.reserve(client, kB, 100, true).size(), 4u);
  f.manager.check();
}

TEST(Manager, CachedBlocksGiveTheirIdsBack) {
  Config config = small_config();
  config.models[1].num_blocks = 5;
  Fixture f(config);
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kB, 4);
  f.publish(client, kB, blocks, {1, 2, 3, 4}, blocks);
  EXPECT_EQ(f.free_pages(), 92);  // pages are plenty, ids are not
  EXPECT_EQ(f.reserve(client, kB, 3).size(), 3u);
  EXPECT_EQ(f.statistics(kB).evictions, 3);
  f.manager.check();
}

TEST(Manager, RefusesDoubleFreeAndForeignBlocksAndDoesNothing) {
  Fixture f;
  const int first = f.manager.connect("first", 1);
  const int second = f.manager.connect("second", 2);
  const Blocks blocks = f.reserve(first, kA, 3);
  for (const Blocks& wrong : {Blocks{blocks[0], blocks[1], blocks[0]}, Blocks{blocks[0], 19}, Blocks{blocks[0], 0},
                              Blocks{blocks[0], -1}, Blocks{blocks[0], 20}, Blocks{blocks[0], 1 << 30}}) {
    EXPECT_EQ(refusal([&] { f.step(first, kA, wrong, 2); }), Code::kNotOwner);
    EXPECT_EQ(f.used(kA), 18);
    f.manager.check();
  }
  EXPECT_EQ(refusal([&] { f.release(second, kA, blocks); }), Code::kNotOwner);
  EXPECT_EQ(refusal([&] { f.publish(second, kA, {blocks[0]}, {1}); }), Code::kNotOwner);
  EXPECT_EQ(refusal([&] { f.publish(first, kA, {19}, {1}, {blocks[0]}); }), Code::kNotOwner);
  f.release(first, kA, blocks);
  EXPECT_EQ(refusal([&] { f.release(first, kA, blocks); }), Code::kNotOwner);
  f.manager.check();
  EXPECT_EQ(f.free_pages(), 100);
}

TEST(Manager, SaysWhatIsWrongWithABlock) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 1);
  const auto words = [&](const Blocks& ids) -> std::string {
    try {
      f.release(client, kA, ids);
    } catch (const Refused& refused) {
      return refused.what();
    }
    return "";
  };
  EXPECT_NE(words({blocks[0], blocks[0]}).find("given twice"), std::string::npos);
  EXPECT_NE(words({5}).find("not held"), std::string::npos);
  EXPECT_NE(words({99}).find("does not exist"), std::string::npos);
}

TEST(Manager, UnknownModelsAreRefused) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  EXPECT_EQ(refusal([&] { f.reserve(client, 2, 1); }), Code::kUnknownModel);
  EXPECT_EQ(refusal([&] { f.manager.reset_cache(99); }), Code::kUnknownModel);
}

TEST(Manager, PrefixHitsShareBlocks) {
  Fixture f;
  const int prefill = f.manager.connect("prefill", 1);
  const int decode = f.manager.connect("decode", 2);
  const Blocks blocks = f.reserve(prefill, kA, 3);
  f.publish(prefill, kA, blocks, {1, 2, 3});
  EXPECT_EQ(f.look_up(decode, kA, {1, 2, 9, 3}), (Blocks{blocks[0], blocks[1]}));
  EXPECT_EQ(f.used(kA), 18);  // shared, not copied
  f.release(prefill, kA, blocks);
  EXPECT_EQ(f.used(kA), 12);
  EXPECT_EQ(f.cached(kA), 6);
  f.release(decode, kA, {blocks[0], blocks[1]});
  EXPECT_EQ(f.used(kA), 0);
  EXPECT_EQ(f.cached(kA), 18);
  EXPECT_EQ(f.look_up(decode, kA, {1, 2, 3, 4}), blocks);
  EXPECT_EQ(f.statistics(kA).lookups, 8);
  EXPECT_EQ(f.statistics(kA).hits, 5);
  f.manager.check();
}

TEST(Manager, HashesOfOneModelAreNotSeenByAnother) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  f.publish(client, kA, f.reserve(client, kA, 1), {1});
  EXPECT_TRUE(f.look_up(client, kB, {1}).empty());
}

TEST(Manager, FirstPublisherWins) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 2);
  f.publish(client, kA, {blocks[0]}, {1});
  f.publish(client, kA, {blocks[1]}, {1});
  f.publish(client, kA, {blocks[0]}, {2});
  EXPECT_EQ(f.look_up(client, kA, {1}), (Blocks{blocks[0]}));
  EXPECT_TRUE(f.look_up(client, kA, {2}).empty());
  f.release(client, kA, blocks);
  EXPECT_EQ(f.cached(kA), 6);  // the second one has no hash and is free
  f.manager.check();
}

TEST(Manager, HitsOfOneClientTwiceAreOneHold) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 1);
  f.publish(client, kA, blocks, {1});
  EXPECT_EQ(f.look_up(client, kA, {1}), blocks);
  f.release(client, kA, blocks);
  EXPECT_EQ(refusal([&] { f.release(client, kA, blocks); }), Code::kNotOwner);
  f.manager.check();
}

TEST(Manager, EvictsOwnOldestFirstThenTheOldestOfOthers) {
  Config config = small_config();
  config.models = {{"a", "p", 1, 10, 20, 100}, {"b", "p", 1, 10, 20, 0}, {"c", "p", 1, 10, 20, 0}};
  Fixture f(config);
  const int client = f.manager.connect("c", 1);
  const auto quotas = [&](std::int64_t a, std::int64_t b, std::int64_t c) {
    f.manager.set_quotas(std::vector<std::pair<std::uint32_t, std::int64_t>>{{0, a}, {1, b}, {2, c}});
  };
  const auto cache = [&](std::uint32_t model, const std::vector<std::uint32_t>& numbers) {
    const Blocks blocks = f.reserve(client, model, static_cast<std::uint32_t>(numbers.size()));
    f.publish(client, model, blocks, numbers, blocks);
  };
  quotas(30, 30, 40);
  cache(1, {1, 2, 3});
  cache(0, {1, 2, 3});
  cache(2, {1, 2, 3, 4});
  EXPECT_EQ(f.free_pages(), 0);
  EXPECT_EQ(f.pool_cached(), 100);
  f.release(client, 1, f.look_up(client, 1, {2}));  // its second block is the most recently used one now
  quotas(60, 0, 40);
  f.reserve(client, 0, 4);  // three of its own, then the oldest of the others
  EXPECT_EQ(f.statistics(0).evictions, 3);
  EXPECT_EQ(f.statistics(1).evictions, 1);
  f.reserve(client, 0, 1);
  EXPECT_EQ(f.statistics(1).evictions, 2);
  f.reserve(client, 0, 1);
  EXPECT_EQ(f.statistics(2).evictions, 1);  // b's last one is younger than c's
  EXPECT_EQ(f.look_up(client, 2, {2, 3, 4}).size(), 3u);
  f.manager.check();
}

TEST(Manager, EarlierReleasedIsEvictedEarlier) {
  Config config = small_config();
  config.models = {{"a", "p", 1, 25, 16, 100}};
  Fixture f(config);
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, 0, 4);
  f.publish(client, 0, blocks, {0, 1, 2, 3}, {blocks[2], blocks[0], blocks[3], blocks[1]});
  f.reserve(client, 0, 2);
  EXPECT_TRUE(f.look_up(client, 0, {2}).empty());
  EXPECT_TRUE(f.look_up(client, 0, {0}).empty());
  EXPECT_EQ(f.look_up(client, 0, {3, 1}).size(), 2u);
}

TEST(Manager, QuotaCountsOwnedAndHandedNotCached) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  Blocks blocks = f.reserve(client, kA, 10);
  f.manager.hand_off(client, kA, "k", blocks, blocks, 100, 0);
  EXPECT_TRUE(f.reserve(client, kA, 1).empty());
  f.manager.drop(kA, "k");
  blocks = f.reserve(client, kA, 10);
  f.publish(client, kA, blocks, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, blocks);
  EXPECT_EQ(f.reserve(client, kA, 10).size(), 10u);
  f.manager.check();
}

TEST(Manager, HitsDoNotExceedTheQuota) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks cached = f.reserve(client, kA, 4);
  f.publish(client, kA, cached, {1, 2, 3, 4}, cached);
  const Blocks others = f.reserve(client, kA, 8);
  EXPECT_EQ(others.size(), 8u);
  EXPECT_EQ(f.look_up(client, kA, {1, 2, 3, 4}).size(), 2u);
  EXPECT_EQ(f.used(kA), 60);
  f.manager.check();
}

TEST(Manager, LoweredQuotaStopsNewPagesOnly) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 10);
  f.manager.set_quotas(std::vector<std::pair<std::uint32_t, std::int64_t>>{{kA, 30}, {kB, 70}});
  EXPECT_EQ(f.quota(kA), 30);
  EXPECT_TRUE(f.reserve(client, kA, 1, true).empty());
  f.release(client, kA, {blocks.begin(), blocks.begin() + 5});
  EXPECT_TRUE(f.reserve(client, kA, 1, true).empty());
  f.release(client, kA, {blocks[5]});
  EXPECT_EQ(f.reserve(client, kA, 5, true).size(), 1u);
}

TEST(Manager, QuotasAreSetTogetherOrNotAtAll) {
  Fixture f;
  using Quotas = std::vector<std::pair<std::uint32_t, std::int64_t>>;
  EXPECT_EQ(refusal([&] { f.manager.set_quotas(Quotas{{kA, 80}}); }), Code::kQuotaExceedsPool);
  EXPECT_EQ(refusal([&] { f.manager.set_quotas(Quotas{{kA, 10}, {9, 1}}); }), Code::kUnknownModel);
  EXPECT_EQ(refusal([&] { f.manager.set_quotas(Quotas{{kA, 10}, {kA, 11}}); }), Code::kInvalid);
  EXPECT_EQ(refusal([&] { f.manager.set_quotas(Quotas{{kA, -1}}); }), Code::kInvalid);
  EXPECT_EQ(f.quota(kA), 60);
  f.manager.set_quotas(Quotas{{kA, 80}, {kB, 21}});  // 101: the pool
  EXPECT_EQ(f.quota(kA), 80);
  EXPECT_EQ(f.quota(kB), 21);
}

TEST(Manager, HandOffMovesOwnership) {
  Fixture f;
  const int prefill = f.manager.connect("prefill", 1);
  const int decode = f.manager.connect("decode", 2);
  const Blocks blocks = f.reserve(prefill, kA, 3);
  f.manager.hand_off(prefill, kA, "request-1", blocks, blocks, 1000, 0);
  EXPECT_EQ(refusal([&] { f.release(prefill, kA, blocks); }), Code::kNotOwner);
  EXPECT_EQ(f.statistics(kA).handed_pages, 18);
  EXPECT_EQ(f.statistics(kA).owned_pages, 0);
  EXPECT_EQ(refusal([&] { f.manager.adopt(decode, kB, "request-1"); }), Code::kUnknownKey);
  f.manager.disconnect(prefill);
  EXPECT_EQ(f.manager.adopt(decode, kA, "request-1"), blocks);
  EXPECT_EQ(refusal([&] { f.manager.adopt(decode, kA, "request-1"); }), Code::kUnknownKey);
  EXPECT_EQ(f.statistics(kA).owned_pages, 18);
  f.manager.check();
  f.release(decode, kA, blocks);
  EXPECT_EQ(f.free_pages(), 100);
}

TEST(Manager, HandOffKeepsWhatItsClientStillUses) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 3);
  f.manager.hand_off(client, kA, "k", blocks, Blocks{blocks[1], blocks[2]}, 1000, 0);
  EXPECT_EQ(f.statistics(kA).owned_pages, 6);
  EXPECT_EQ(f.statistics(kA).handed_pages, 12);
  f.release(client, kA, {blocks[0]});  // still in the hand-off
  EXPECT_EQ(f.statistics(kA).handed_pages, 18);
  EXPECT_EQ(f.manager.adopt(client, kA, "k"), blocks);
  f.release(client, kA, blocks);
  EXPECT_EQ(f.free_pages(), 100);
  f.manager.check();
}

TEST(Manager, BlocksInTwoHandOffsStayUntilBothAreGone) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 2);
  f.manager.hand_off(client, kA, "one", blocks, Blocks{}, 1000, 0);
  f.manager.hand_off(client, kA, "two", Blocks{blocks[0]}, blocks, 1000, 0);
  f.manager.drop(kA, "one");
  EXPECT_EQ(f.used(kA), 6);
  f.manager.drop(kA, "two");
  EXPECT_EQ(f.used(kA), 0);
  f.manager.check();
}

TEST(Manager, RefusedHandOffsChangeNothing) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 3);
  const auto hand_off = [&](const std::string& key, const Blocks& what, const Blocks& release, std::int64_t ttl = 10) {
    return refusal([&] { f.manager.hand_off(client, kA, key, what, release, ttl, 0); });
  };
  EXPECT_EQ(hand_off("k", {blocks[0], blocks[0]}, {}), Code::kNotOwner);
  EXPECT_EQ(hand_off("k", {blocks[0], 19}, {}), Code::kNotOwner);
  EXPECT_EQ(hand_off("k", blocks, {blocks[0], 19}), Code::kNotOwner);
  EXPECT_EQ(hand_off("k", blocks, {blocks[1], blocks[1]}), Code::kNotOwner);
  EXPECT_EQ(hand_off("", blocks, blocks), Code::kInvalid);
  EXPECT_EQ(hand_off(std::string(129, 'x'), blocks, blocks), Code::kInvalid);
  EXPECT_EQ(hand_off("k", blocks, blocks, 0), Code::kInvalid);
  EXPECT_EQ(f.statistics(kA).owned_pages, 18);
  f.manager.check();
  EXPECT_EQ(hand_off("k", {blocks[0]}, {blocks[0]}), Code::kOk);
  EXPECT_EQ(hand_off("k", {blocks[1]}, {blocks[1]}), Code::kKeyExists);
  EXPECT_EQ(f.statistics(kA).owned_pages, 12);
  f.manager.check();
}

TEST(Manager, ExpiredHandOffsAreReleased) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 3);
  EXPECT_EQ(f.manager.next_deadline(), kNever);
  f.manager.hand_off(client, kA, "early", Blocks{blocks[0]}, Blocks{blocks[0]}, 10, 100);
  f.manager.hand_off(client, kA, "late", Blocks{blocks[1]}, Blocks{blocks[1]}, 50, 100);
  EXPECT_EQ(f.manager.next_deadline(), 110);
  f.manager.expire(109);
  EXPECT_EQ(f.statistics(kA).hand_offs, 2);
  f.manager.expire(110);
  EXPECT_EQ(f.statistics(kA).hand_offs, 1);
  EXPECT_EQ(f.statistics(kA).expired, 1);
  EXPECT_EQ(f.manager.next_deadline(), 150);
  EXPECT_EQ(f.used(kA), 12);
  EXPECT_EQ(refusal([&] { f.manager.adopt(client, kA, "early"); }), Code::kUnknownKey);
  f.manager.check();
}

TEST(Manager, DisconnectReleasesEverythingHeld) {
  Fixture f;
  const int dead = f.manager.connect("dead", 1);
  const int alive = f.manager.connect("alive", 2);
  const Blocks blocks = f.reserve(dead, kA, 3);
  f.publish(dead, kA, {blocks[0], blocks[1]}, {1, 2});
  f.look_up(alive, kA, {1});
  f.reserve(dead, kB, 7);
  f.manager.disconnect(dead);
  EXPECT_EQ(f.used(kA), 6);
  EXPECT_EQ(f.cached(kA), 6);
  EXPECT_EQ(f.used(kB), 0);
  f.manager.check();
  EXPECT_EQ(f.manager.connect("new", 3), dead);  // the slot is free again and holds nothing
  EXPECT_EQ(refusal([&] { f.release(dead, kA, {blocks[0]}); }), Code::kNotOwner);
}

TEST(Manager, HasSixtyFourClientSlots) {
  Fixture f;
  for (int i = 0; i < kMaxClients; ++i) EXPECT_EQ(f.manager.connect("c", i), i);
  EXPECT_EQ(refusal([&] { f.manager.connect("one more", 65); }), Code::kTooManyClients);
  const Blocks blocks = f.reserve(63, kA, 1);
  f.publish(63, kA, blocks, {1});
  for (int i = 0; i < kMaxClients; ++i) EXPECT_EQ(f.look_up(i, kA, {1}), blocks);
  for (int i = 0; i < kMaxClients; ++i) f.manager.disconnect(i);
  EXPECT_EQ(f.used(kA), 0);
  f.manager.check();
}

TEST(Manager, ResetCacheForgetsHashes) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 2);
  f.publish(client, kA, blocks, {1, 2}, {blocks[1]});
  f.manager.reset_cache(kA);
  EXPECT_EQ(f.cached(kA), 0);
  EXPECT_EQ(f.statistics(kA).published, 0);
  EXPECT_EQ(f.statistics(kA).evictions, 0);
  EXPECT_TRUE(f.look_up(client, kA, {1}).empty());
  f.release(client, kA, {blocks[0]});
  EXPECT_EQ(f.free_pages(), 100);
  f.manager.check();
}

TEST(Manager, ModelsComeAndGo) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  EXPECT_EQ(refusal([&] { f.manager.add_model({"a", "p", 1, 1, 4, 1}); }), Code::kInvalid);
  EXPECT_EQ(refusal([&] { f.manager.add_model({"c", "q", 1, 1, 4, 1}); }), Code::kInvalid);
  EXPECT_EQ(refusal([&] { f.manager.add_model({"c", "p", 0, 1, 4, 1}); }), Code::kInvalid);
  EXPECT_EQ(refusal([&] { f.manager.add_model({"c", "p", 1, 1, 4, 2}); }), Code::kQuotaExceedsPool);
  const std::uint32_t index = f.manager.add_model({"c", "p", 1, 1, 4, 1});
  EXPECT_EQ(index, 2u);
  const Blocks blocks = f.reserve(client, index, 1);
  EXPECT_EQ(blocks.size(), 1u);
  EXPECT_EQ(refusal([&] { f.manager.remove_model(index); }), Code::kModelInUse);
  f.publish(client, index, blocks, {1}, blocks);
  f.manager.remove_model(index);
  EXPECT_EQ(refusal([&] { f.reserve(client, index, 1); }), Code::kUnknownModel);
  EXPECT_EQ(f.free_pages(), 100);
  EXPECT_EQ(f.manager.next_deadline(), kNever);
  EXPECT_EQ(f.manager.add_model({"c", "p", 1, 1, 4, 1}), 3u);  // never the same index again
  f.manager.check();
}

TEST(Manager, DescribesItself) {
  Fixture f;
  f.manager.connect("me \"quoted\"", 42);
  EXPECT_NE(f.manager.describe({{"posix:x", "posix:y"}}).find("\"handles\": [\"posix:x\", \"posix:y\"]"),
            std::string::npos);
  EXPECT_NE(f.manager.statistics().find("\"name\": \"me \\\"quoted\\\"\", \"pid\": 42"), std::string::npos);
}

TEST(Manager, SurvivesAnythingInAnyOrder) {
  // A long random run; check() recounts everything from the blocks and pages themselves.
  Config config = small_config();
  config.models[0].quota_pages = 50;
  config.models[1].quota_pages = 30;
  Fixture f(config);
  std::mt19937 random(20240917);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  constexpr int kClients = 5;
  std::vector<bool> connected(kClients, false);
  std::int64_t now = 0;
  int granted = 0, refused = 0;
  for (int round = 0; round < 40000; ++round) {
    const int client = pick(kClients);
    const auto model = static_cast<std::uint32_t>(pick(2));
    if (!connected[static_cast<std::size_t>(client)]) {
      // Slots are handed out lowest first, so the one that is free is not always `client`.
      const int slot = f.manager.connect("c", round);
      ASSERT_LT(slot, kClients);
      connected[static_cast<std::size_t>(slot)] = true;
      continue;
    }
    Blocks ids;
    for (int i = pick(4); i > 0; --i) ids.push_back(pick(model == kA ? 21 : 41));
    const Code code = refusal([&] {
      switch (pick(12)) {
        case 0:
        case 1:
        case 2:
          granted +=
              static_cast<int>(f.reserve(client, model, static_cast<std::uint32_t>(pick(6)), pick(2) == 0).size());
          break;
        case 3:
        case 4:
          f.release(client, model, ids);
          break;
        case 5:
        case 6: {
          std::vector<std::uint32_t> numbers;
          for (std::size_t i = 0; i < ids.size(); ++i) numbers.push_back(static_cast<std::uint32_t>(pick(30)));
          f.publish(client, model, ids, numbers, pick(2) == 0 ? ids : Blocks{});
          break;
        }
        case 7:
          f.look_up(client, model, {static_cast<std::uint32_t>(pick(30)), static_cast<std::uint32_t>(pick(30))});
          break;
        case 8:
          f.manager.hand_off(client, model, std::to_string(pick(4)), ids, pick(2) == 0 ? ids : Blocks{}, 1 + pick(50),
                             now);
          break;
        case 9:
          f.manager.adopt(client, model, std::to_string(pick(4)));
          break;
        case 10:
          f.manager.expire(now += pick(20));
          break;
        default:
          if (pick(20) == 0) {
            f.manager.disconnect(client);
            connected[static_cast<std::size_t>(client)] = false;
          } else if (pick(20) == 0) {
            f.manager.reset_cache(model);
          } else {
            const std::int64_t a = pick(102);
            f.manager.set_quotas(std::vector<std::pair<std::uint32_t, std::int64_t>>{{kA, a}, {kB, 101 - a}});
          }
      }
    });
    if (code != Code::kOk) ++refused;
    if (round % 16 == 0) f.manager.check();
  }
  EXPECT_GT(granted, 1000);
  EXPECT_GT(refused, 1000);
  for (int client = 0; client < kClients; ++client)
    if (connected[static_cast<std::size_t>(client)]) f.manager.disconnect(client);
  f.manager.expire(kNever);
  f.manager.reset_cache(kA);
  f.manager.reset_cache(kB);
  f.manager.check();
  EXPECT_EQ(f.free_pages(), 100);
}

// Model "a" with a window in the first of its two layers, which reaches two full blocks back.
Config windowed_config() {
  Config config = small_config();
  config.models[kA].windowed_layers = {0};
  config.models[kA].window_blocks = 2;
  return config;
}

TEST(Windows, PagesBehindAreFreed) {
  Fixture f(windowed_config());
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 3);
  f.manager.leave_window(client, kA, Blocks{blocks[0], blocks[1]});
  f.manager.leave_window(client, kA, Blocks{blocks[0]});  // again
  EXPECT_EQ(f.used(kA), 12);
  EXPECT_EQ(f.free_pages(), 88);
  const std::int32_t* row = f.manager.model(kA).table() + blocks[0] * 6;
  EXPECT_TRUE(std::all_of(row, row + 3, [](std::int32_t page) { return page == 0; }));
  EXPECT_TRUE(std::all_of(row + 3, row + 6, [](std::int32_t page) { return page > 0; }));
  f.manager.check();
  f.release(client, kA, blocks);
  EXPECT_EQ(f.free_pages(), 100);
  f.manager.check();
  EXPECT_EQ(refusal([&] { f.manager.leave_window(client, kA, blocks); }), Code::kNotOwner);
  EXPECT_EQ(refusal([&] { f.manager.leave_window(client, kB, blocks); }), Code::kInvalid);
}

TEST(Windows, OthersKeepTheirPages) {
  Fixture f(windowed_config());
  const int client = f.manager.connect("c", 1), other = f.manager.connect("d", 2);
  const Blocks blocks = f.reserve(client, kA, 2);
  f.publish(client, kA, blocks, {1, 2});
  EXPECT_EQ(f.look_up(other, kA, {1}).size(), 1u);
  f.manager.leave_window(client, kA, blocks);
  EXPECT_EQ(f.used(kA), 9);
  f.manager.check();
}

TEST(Windows, PublishedPagesAreCachedAndComeBack) {
  Fixture f(windowed_config());
  const int client = f.manager.connect("c", 1), other = f.manager.connect("d", 2);
  const Blocks blocks = f.reserve(client, kA, 4);
  f.publish(client, kA, blocks, {1, 2, 3, 4});
  f.manager.leave_window(client, kA, Blocks{blocks[0], blocks[1]});
  EXPECT_EQ(f.used(kA), 18);
  EXPECT_EQ(f.cached(kA), 6);
  EXPECT_EQ(f.look_up(other, kA, {1, 2, 3, 4}).size(), 4u);  // what the last two blocks see is there
  EXPECT_EQ(f.cached(kA), 6);
  EXPECT_EQ(f.look_up(other, kA, {1, 2, 9}).size(), 2u);  // here the first two are needed
  EXPECT_EQ(f.cached(kA), 0);
  EXPECT_EQ(f.used(kA), 24);
  f.manager.check();
}

TEST(Windows, CachedPagesAreTakenAndTheirBlockMakesWay) {
  Fixture f(windowed_config());
  const std::vector<std::pair<std::uint32_t, std::int64_t>> quotas{{kA, 58}, {kB, 43}};
  f.manager.set_quotas(quotas);
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 3);
  f.publish(client, kA, blocks, {1, 2, 3});
  f.manager.leave_window(client, kA, Blocks{blocks[0]});
  f.reserve(client, kB, 20);
  const Blocks more = f.reserve(client, kA, 7);
  ASSERT_EQ(more.size(), 7u);
  EXPECT_EQ(f.free_pages(), 0);
  EXPECT_EQ(f.reserve(client, kB, 1).size(), 1u);
  EXPECT_EQ(f.cached(kA), 0);
  EXPECT_EQ(f.free_pages(), 1);
  EXPECT_TRUE(f.look_up(client, kA, {1}).empty());
  f.manager.check();
  f.publish(client, kA, {more[0]}, {1}, {blocks[0]});  // the same content with all of its pages
  EXPECT_EQ(f.look_up(client, kA, {1}), Blocks{more[0]});
  f.manager.check();
}

TEST(Manager, CheckFindsAPageThatIsInUseTwice) {
  // The other tests lean on check(): it must be able to fail.
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 2);
  auto* table = const_cast<std::int32_t*>(f.manager.model(kA).table());
  const std::int32_t good = table[blocks[0] * 6];
  for (const std::int32_t wrong : {table[blocks[1] * 6], 0, -1, 101}) {
    table[blocks[0] * 6] = wrong;
    EXPECT_THROW(f.manager.check(), std::logic_error);
  }
  table[blocks[0] * 6] = good;
  f.manager.check();
}

}  // namespace
}  // namespace muxserve::memory::testing
