#include "pages/pages.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace muxserve::memory::testing {
namespace {

using Ids = std::vector<std::int32_t>;

struct Pool {
  Pool(std::size_t pages, std::size_t bytes, std::uint32_t seed)
      : num_pages(pages), page_bytes(bytes), data(pages * bytes) {
    std::mt19937 random(seed);
    for (auto& byte : data) byte = static_cast<std::uint8_t>(random());
  }
  PoolView<const std::uint8_t> read() const { return {data.data(), num_pages, page_bytes}; }
  PoolView<std::uint8_t> write() { return {data.data(), num_pages, page_bytes}; }
  std::vector<std::uint8_t> page(std::int32_t id) const {
    const auto begin = data.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(id) * page_bytes);
    return {begin, begin + static_cast<std::ptrdiff_t>(page_bytes)};
  }

  std::size_t num_pages, page_bytes;
  std::vector<std::uint8_t> data;
};

// Page lists with runs and jumps, without page 0 and without repetition.
Ids some_pages(std::size_t count, std::size_t num_pages, std::uint32_t seed) {
  Ids all(num_pages - 1);
  std::iota(all.begin(), all.end(), 1);
  std::mt19937 random(seed);
  for (std::size_t cuts = 0; cuts < 4; ++cuts) {
    const auto at = static_cast<std::ptrdiff_t>(random() % all.size());
    std::rotate(all.begin(), all.begin() + at, all.end());
    std::reverse(all.begin(), all.begin() + at / 2);
  }
  all.resize(count);
  return all;
}

TEST(Pages, CopiesThoseThatAreNamedAndNoOther) {
  for (std::uint32_t seed = 1; seed < 30; ++seed) {
    const Pool source(40, 24, seed);
    Pool destination(50, 24, seed + 1000);
    const Pool before = destination;
    const std::size_t count = seed % 20;
    const Ids from = some_pages(count, 40, seed), to = some_pages(count, 50, seed * 7);
    copy_pages(source.read(), from, destination.write(), to);
    for (std::int32_t page = 0; page < 50; ++page) {
      const auto found = std::find(to.begin(), to.end(), page);
      if (found == to.end())
        EXPECT_EQ(destination.page(page), before.page(page));
      else
        EXPECT_EQ(destination.page(page), source.page(from[static_cast<std::size_t>(found - to.begin())]));
    }
  }
}

TEST(Pages, WhatIsGatheredAndScatteredIsWhatWouldBeCopied) {
  for (std::uint32_t seed = 1; seed < 30; ++seed) {
    const Pool source(40, 24, seed);
    Pool one(50, 24, 5), other(50, 24, 5);
    const std::size_t count = seed % 20;
    const Ids from = some_pages(count, 40, seed), to = some_pages(count, 50, seed * 7);
    std::vector<std::uint8_t> buffer(count * 24);
    gather_pages(source.read(), from, buffer.data(), buffer.size());
    scatter_pages(buffer.data(), buffer.size(), one.write(), to);
    copy_pages(source.read(), from, other.write(), to);
    EXPECT_EQ(one.data, other.data);
  }
}

TEST(Pages, ReadsTheNullPageAndNeverWritesIt) {
  const Pool source(4, 8, 1);
  Pool destination(4, 8, 2);
  const Pool before = destination;
  copy_pages(source.read(), Ids{0}, destination.write(), Ids{2});
  EXPECT_EQ(destination.page(2), source.page(0));
  std::vector<std::uint8_t> buffer(8);
  EXPECT_THROW(copy_pages(source.read(), Ids{1}, destination.write(), Ids{0}), std::out_of_range);
  EXPECT_THROW(scatter_pages(buffer.data(), 8, destination.write(), Ids{0}), std::out_of_range);
  EXPECT_EQ(destination.page(0), before.page(0));
}

TEST(Pages, RefusesWhatDoesNotFitAndWritesNothing) {
  const Pool source(4, 8, 1), coarse(4, 16, 1);
  Pool destination(6, 8, 2);
  const Pool before = destination;
  std::vector<std::uint8_t> buffer(16);
  const std::vector<std::uint8_t> empty(16);
  for (const std::int32_t wrong : {-1, 4, 1 << 30}) {
    EXPECT_THROW(copy_pages(source.read(), Ids{1, wrong}, destination.write(), Ids{1, 2}), std::out_of_range);
    EXPECT_THROW(gather_pages(source.read(), Ids{1, wrong}, buffer.data(), 16), std::out_of_range);
  }
  for (const std::int32_t wrong : {-1, 6, 1 << 30}) {
    EXPECT_THROW(copy_pages(source.read(), Ids{1, 2}, destination.write(), Ids{1, wrong}), std::out_of_range);
    EXPECT_THROW(scatter_pages(buffer.data(), 16, destination.write(), Ids{1, wrong}), std::out_of_range);
  }
  EXPECT_THROW(copy_pages(source.read(), Ids{1, 2}, destination.write(), Ids{1}), std::invalid_argument);
  EXPECT_THROW(copy_pages(coarse.read(), Ids{1}, destination.write(), Ids{1}), std::invalid_argument);
  EXPECT_THROW(gather_pages(source.read(), Ids{1}, buffer.data(), 16), std::invalid_argument);
  EXPECT_THROW(scatter_pages(buffer.data(), 16, destination.write(), Ids{1}), std::invalid_argument);
  EXPECT_EQ(destination.data, before.data);
  EXPECT_EQ(buffer, empty);
}

TEST(Pages, SeveralThreadsCopyDifferentPagesAtOnce) {
  const Pool source(200, 64, 1);
  Pool destination(200, 64, 2);
  std::vector<std::thread> threads;
  for (std::int32_t part = 0; part < 4; ++part) {
    threads.emplace_back([&, part] {
      Ids ids;
      for (std::int32_t page = 1 + part; page < 200; page += 4) ids.push_back(page);
      copy_pages(source.read(), ids, destination.write(), ids);
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::int32_t page = 1; page < 200; ++page) EXPECT_EQ(destination.page(page), source.page(page));
}

}  // namespace
}  // namespace muxserve::memory::testing
