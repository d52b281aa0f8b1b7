// What a client may make is bounded, and what is refused is refused in words that everybody can read.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "failing_allocations.hpp"
#include "prefix_index.hpp"
#include "support.hpp"
#include "text.hpp"

namespace muxserve::memory::testing {
namespace {

using Blocks = std::vector<std::int32_t>;

// The words of the refusal that `action` meets, empty if it meets none.
std::string words_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Refused& refused) {
    return refused.what();
  }
  return {};
}

const std::vector<std::string> kNotNames = {
    "",
    std::string(129, 'x'),
    "a\nb",
    std::string("a\0b", 3),
    "\x7F",
    "\xC2\x85",          // a control character of two bytes
    "\xE2\x80\xA8",      // a line separator
    "\xFF\xFE",          // no UTF-8 at all
    "\x80",              // a byte that goes on with nothing
    "\xC3",              // a character that is cut
    "\xC0\xAF",          // '/' in two bytes
    "\xED\xA0\x80",      // half of a surrogate pair
    "\xF4\x90\x80\x80",  // beyond the last character
    "\xF8\x88\x80\x80\x80",
};
const std::vector<std::string> kNames = {"c", std::string(128, 'x'), "prefill/\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80",
                                         "\"\\"};

TEST(Text, TellsNamesFromWhatCannotBeOne) {
  for (const std::string& text : kNotNames) {
    EXPECT_NE(name_problem(text, 128), "") << printable(text, 100);
    const std::string shown = printable(text, 20);
    EXPECT_TRUE(is_utf8(shown));
    EXPECT_LE(shown.size(), 20u);
    if (!shown.empty()) EXPECT_EQ(name_problem(shown, 20), "");
  }
  for (const std::string& text : kNames) {
    EXPECT_EQ(name_problem(text, 128), "");
    EXPECT_EQ(printable(text, 128), text);
  }
  EXPECT_EQ(printable("a\xFF\xC3", 10), "a??");
  EXPECT_EQ(printable("0123456789", 8), "01234...");
}

TEST(Limits, EveryReaderOfStatisticsCanDecodeThem) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  const Blocks blocks = f.reserve(client, kA, 1);
  for (const std::string& text : kNotNames) {
    EXPECT_EQ(refusal([&] { f.manager.connect(text, 1); }), Code::kInvalid);
    EXPECT_EQ(refusal([&] { f.manager.hand_off(client, kA, text, blocks, {}, 1000, 0); }), Code::kInvalid);
    EXPECT_EQ(refusal([&] { f.manager.adopt(client, kA, text); }), Code::kInvalid);
    EXPECT_EQ(refusal([&] { f.manager.drop(kA, text); }), Code::kInvalid);
    EXPECT_EQ(refusal([&] { f.manager.add_model({text, "p", 1, 1, 4, 0}); }), Code::kInvalid);
    EXPECT_EQ(refusal([&] { f.manager.add_model({"n", text, 1, 1, 4, 0}); }), Code::kInvalid);
  }
  for (const std::string& text : kNames) {
    f.manager.connect(text, 1);
    f.manager.hand_off(client, kA, text, blocks, {}, 1000, 0);
    f.manager.add_model({text, "p", 1, 1, 4, 0});
  }
  EXPECT_TRUE(is_utf8(f.manager.statistics()));
  EXPECT_TRUE(is_utf8(f.manager.describe({})));
  EXPECT_EQ(words_of([&] { f.manager.connect("\xFF", 1); }), "the client's name is not UTF-8");
}

TEST(Limits, NamesInConfigurationsAreUtf8) {
  for (const std::string& text : kNotNames) {
    Config config = small_config();
    config.models[0].name = text;
    EXPECT_THROW(check_config(config), ConfigError);
    config = small_config();
    config.pools.push_back({text, 64, 10});
    EXPECT_THROW(check_config(config), ConfigError);
  }
}

TEST(Limits, HandOffsAreCountedByClientAndModel) {
  Limits limits;
  limits.hand_offs_per_client = 3;
  limits.hand_offs_per_model = 4;
  HeapSegments segments;
  Manager manager(small_config(), segments, 7, limits);
  const int first = manager.connect("first", 1), second = manager.connect("second", 2);
  const auto held = [&](int client, std::uint32_t model) {
    StepRequest request;
    request.model = model;
    request.reserve = 1;
    StepReply reply;
    manager.step(client, request, reply);
    return reply.reserved;
  };
  const Blocks a = held(first, kA), b = held(first, kB), other = held(second, kA);
  const auto make = [&](int client, std::uint32_t model, const std::string& key, const Blocks& blocks) {
    return words_of([&] { manager.hand_off(client, model, key, blocks, {}, 1000, 0); });
  };
  EXPECT_EQ(make(first, kA, "1", a), "");
  EXPECT_EQ(make(first, kB, "2", b), "");
  EXPECT_EQ(make(first, kA, "3", a), "");
  EXPECT_EQ(make(first, kA, "4", a),
            "a client may have at most 3 waiting hand-offs; adopt or drop some first. Nothing was done");
  EXPECT_EQ(make(second, kA, "4", other), "");
  manager.drop(kA, "1");
  EXPECT_EQ(make(first, kA, "5", a), "");  // one of its own is gone
  manager.disconnect(first);               // what it has made waits on, and counts for the model
  const int third = manager.connect("third", 3);
  const Blocks more = held(third, kA);
  EXPECT_EQ(make(third, kA, "6", more), "");
  EXPECT_NE(make(third, kA, "7", more).find("model \"a\" may have at most 4"), std::string::npos);
  manager.check();
  manager.expire(2000);
  EXPECT_EQ(make(third, kA, "7", more), "");
  manager.check();
}

TEST(Limits, HandOffsOfNothingAreRefused) {
  Fixture f;
  const int client = f.manager.connect("c", 1);
  EXPECT_EQ(refusal([&] { f.manager.hand_off(client, kA, "k", Blocks{}, Blocks{}, 10, 0); }), Code::kInvalid);
  EXPECT_EQ(f.manager.next_deadline(), kNever);
}

TEST(Limits, HandOffsNameABoundedNumberOfBlocks) {
  Limits limits;
  limits.handed_ids = 32;
  HeapSegments segments;
  Manager manager(small_config(), segments, 7, limits);
  const int client = manager.connect("c", 1);
  StepRequest request;
  request.reserve = 10;
  StepReply reply;
  manager.step(client, request, reply);
  int made = 0;
  const auto make = [&] { manager.hand_off(client, kA, std::to_string(made), reply.reserved, {}, 1000, 0); };
  while (refusal(make) == Code::kOk) ++made;
  EXPECT_EQ(made, 3);
  EXPECT_EQ(words_of(make).substr(0, 79),
            "the waiting hand-offs of all models would name 40 blocks, more than 32; adopt o");
  manager.drop(kA, "0");
  EXPECT_EQ(words_of(make), "");
}

TEST(Limits, TablesAreNotLargerThanThePoolCanFill) {
  Config config;
  config.prefix = "muxserve-test";
  config.pools = {{"p", 64, 1001}};
  config.models = {{"a", "p", 2, 2, 1001, 100}};
  check_config(config);
  config.models[0].num_blocks = 1002;
  EXPECT_THROW(check_config(config), ConfigError);
  config.models.clear();
  Fixture f(config);
  // 2^20 blocks of 2^16 pages: a table of 256 GiB.
  const std::string words = words_of([&] { f.manager.add_model({"huge", "p", 256, 256, 1 << 20, 0}); });
  EXPECT_NE(words.find("more than pool \"p\" can ever fill"), std::string::npos) << words;
  EXPECT_EQ(refusal([&] { f.manager.add_model({"huge", "p", 1 << 20, 1 << 20, 2, 0}); }), Code::kInvalid);
  EXPECT_EQ(f.manager.add_model({"sane", "p", 2, 2, 1001, 0}), 0u);
}

TEST(Limits, TablesOfAllModelsAreBounded) {
  Limits limits;
  limits.table_bytes = 3 * ModelTable::bytes({"a", "p", 1, 1, 400, 0});
  HeapSegments segments;
  Config config = small_config();
  config.models.clear();
  Manager manager(config, segments, 7, limits);
  for (int i = 0; i < 3; ++i) manager.add_model({std::to_string(i), "p", 1, 1, 400, 0});
  EXPECT_NE(words_of([&] { manager.add_model({"more", "p", 1, 1, 400, 0}); }).find("--max-tables-mib"),
            std::string::npos);
  manager.remove_model(1);
  manager.add_model({"more", "p", 1, 1, 400, 0});
}

TEST(Limits, NobodyChoosesHashesThatCollide) {
  // Hashes that differ only where a multiplication carries nothing down: 2^14 of them fell into one slot, which made
  // one request of half a megabyte a second's work.
  constexpr std::int32_t kCount = 1 << 14;
  PrefixIndex index(1 << 20, 12345);
  std::size_t probes = 0;
  for (std::int32_t i = 1; i < kCount; ++i) {
    Hash hash{};
    const std::uint64_t word = static_cast<std::uint64_t>(i) << 50;
    std::memcpy(hash.data() + 24, &word, sizeof word);
    index.insert(i, hash);
    probes = std::max(probes, index.probes(hash));
  }
  EXPECT_LT(probes, 50u);
}

// ---------------------------------------------------------------------------- memory that runs out

// Lets every allocation of `action` fail in turn, on a fresh manager each time: nothing must have changed then.
void with_every_allocation_failing(const std::function<void(Fixture&)>& before,
                                   const std::function<void(Fixture&)>& action) {
  int failures = 0;
  for (bool done = false; !done; ++failures) {
    Fixture f;
    before(f);
    const std::string was = f.manager.statistics();
    {
      const FailingAllocation failing(failures);
      try {
        action(f);
      } catch (const std::bad_alloc&) {
      }
      done = !failing.happened();
    }
    f.manager.check();
    if (!done) EXPECT_EQ(f.manager.statistics(), was) << "allocation " << failures;
    action(f);  // and it can be done now, or again what can be done twice
    f.manager.check();
    ASSERT_LT(failures, 200);
  }
  EXPECT_GT(failures, 1) << "nothing was allocated";
}

TEST(OutOfMemory, ChangesNothing) {
  const std::vector<Hash> hashes = hashes_of({1, 2, 3});
  const Blocks all{1, 2, 3};
  const auto start = [&](Fixture& f) {
    f.manager.connect("client", 1);
    EXPECT_EQ(f.reserve(0, kA, 3), all);
    f.publish(0, kA, all, {1, 2, 3});
  };
  const auto connect = [](Fixture& f) { f.manager.connect(std::string(100, 'x'), 2); };
  with_every_allocation_failing(start, connect);
  with_every_allocation_failing(start, [&](Fixture& f) {
    const std::vector<std::uint32_t> lengths{3};
    StepRequest request;
    request.publish = all;
    request.publish_hashes = hashes;
    request.lookup_lengths = lengths;
    request.lookup_hashes = hashes;
    request.reserve = 2;
    StepReply reply;
    f.manager.step(0, request, reply);
  });
  int key = 0;
  with_every_allocation_failing(start, [&](Fixture& f) {
    const std::string name = std::string(100, 'k') + std::to_string(key++);
    f.manager.hand_off(0, kA, name, all, all, 1000, 0);
    f.manager.adopt(0, kA, name);
  });
  with_every_allocation_failing(start, [&](Fixture& f) {
    if (f.manager.next_deadline() == kNever) f.manager.hand_off(0, kA, "k", all, all, 1000, 0);
  });
  with_every_allocation_failing(start, [](Fixture& f) {
    f.manager.set_quotas(std::vector<std::pair<std::uint32_t, std::int64_t>>{{kA, 50}, {kB, 51}});
  });
}

TEST(OutOfMemory, AddsAModelWhollyOrNotAtAll) {
  with_every_allocation_failing([](Fixture&) {},
                                [](Fixture& f) {
                                  const std::uint32_t index =
                                      f.manager.add_model({std::string(100, 'm'), "p", 1, 2, 40, 0});
                                  f.manager.remove_model(index);
                                });
}

}  // namespace
}  // namespace muxserve::memory::testing
