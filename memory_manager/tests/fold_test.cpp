#include "fold/fold.hpp"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>
#include <vector>

namespace muxserve::memory::testing {
namespace {

struct Case {
  std::size_t blocks, layers, heads, requests, columns, stride;
};

class Fold : public ::testing::TestWithParam<Case> {};

TEST_P(Fold, EqualsItsDefinition) {
  const Case c = GetParam();
  std::mt19937 random(3);
  std::vector<std::int32_t> table(c.blocks * c.layers * c.heads), ids(c.requests * c.stride, -7);
  for (auto& page : table) page = static_cast<std::int32_t>(random() % 100000);
  for (std::size_t r = 0; r < c.requests; ++r)
    for (std::size_t j = 0; j < c.columns; ++j) ids[r * c.stride + j] = static_cast<std::int32_t>(random() % c.blocks);
  const PageTableView pages{table.data(), c.blocks, c.layers, c.heads};
  const BlockTableView blocks{ids.data(), c.requests, c.columns, c.stride};
  const std::size_t rows = c.requests * c.heads;
  for (const RowOrder order : {RowOrder::kRequestMajor, RowOrder::kHeadMajor}) {
    std::vector<std::int32_t> out(c.layers * rows * c.columns, -1);
    fold_blocks(pages, blocks, order, {out.data(), rows * c.columns, c.columns});
    for (std::size_t l = 0; l < c.layers; ++l)
      for (std::size_t r = 0; r < c.requests; ++r)
        for (std::size_t h = 0; h < c.heads; ++h)
          for (std::size_t j = 0; j < c.columns; ++j) {
            const std::size_t row = order == RowOrder::kRequestMajor ? r * c.heads + h : h * c.requests + r;
            const auto block = static_cast<std::size_t>(ids[r * c.stride + j]);
            ASSERT_EQ(out[(l * rows + row) * c.columns + j], table[(block * c.layers + l) * c.heads + h]);
          }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Fold,
                         ::testing::Values(Case{5, 2, 1, 3, 4, 4}, Case{9, 3, 2, 4, 7, 10}, Case{9, 1, 3, 1, 1, 5},
                                           Case{50, 4, 4, 6, 20, 32}, Case{50, 2, 8, 5, 9, 9}, Case{3, 2, 2, 0, 4, 4},
                                           Case{3, 2, 2, 4, 0, 4}));

TEST(Fold, RefusesBlocksBeyondTheTable) {
  const std::vector<std::int32_t> table(12);
  std::vector<std::int32_t> out(4, 42);
  const PageTableView pages{table.data(), 3, 2, 2};
  for (const std::int32_t wrong : {3, -1, 1 << 30}) {
    const std::vector<std::int32_t> ids{wrong};
    EXPECT_THROW(fold_blocks(pages, {ids.data(), 1, 1, 1}, RowOrder::kRequestMajor, {out.data(), 2, 1}),
                 std::out_of_range);
  }
  const std::vector<std::int64_t> slots{0, 3 * 16};
  std::vector<std::int64_t> folded(8, 42);
  EXPECT_THROW(fold_slots(pages, slots.data(), 2, 16, folded.data(), 4), std::out_of_range);
  EXPECT_EQ(out, (std::vector<std::int32_t>(4, 42)));
  EXPECT_EQ(folded, (std::vector<std::int64_t>(8, 42)));
}

TEST(Fold, MapsSlots) {
  const std::vector<std::int32_t> table{0, 0, 0, 0, 10, 11, 12, 13, 20, 21, 22, 2000000000};
  const PageTableView pages{table.data(), 3, 2, 2};
  const std::vector<std::int64_t> slots{2 * 16 + 5, -1, 16};
  std::vector<std::int64_t> out(12);
  fold_slots(pages, slots.data(), 3, 16, out.data(), 6);
  EXPECT_EQ(out, (std::vector<std::int64_t>{325, 341, -1, -1, 160, 176, 357, 32000000005, -1, -1, 192, 208}));
}

}  // namespace
}  // namespace muxserve::memory::testing
