#include "fold.hpp"

#include <stdexcept>
#include <string>

namespace muxserve::memory {
namespace {

[[noreturn]] void no_such_block(std::int64_t block, std::size_t num_blocks) {
  throw std::out_of_range("block " + std::to_string(block) + " is not in the page table of " +
                          std::to_string(num_blocks) + " blocks");
}

// kHeads > 0 lets the compiler unroll the innermost loop for the usual head counts; 0 is any count.
template <std::size_t kHeads>
void fold_request(const PageTableView& pages, const std::int32_t* blocks, std::size_t columns, std::int32_t* out,
                  std::size_t layer_stride, std::size_t head_stride) {
  const std::size_t heads = kHeads > 0 ? kHeads : pages.kv_heads;
  for (std::size_t layer = 0; layer < pages.layers; ++layer) {
    std::int32_t* rows = out + layer * layer_stride;
    for (std::size_t column = 0; column < columns; ++column) {
      const auto block = static_cast<std::size_t>(blocks[column]);
      const std::int32_t* entry = pages.data + (block * pages.layers + layer) * heads;
      for (std::size_t head = 0; head < heads; ++head) rows[head * head_stride + column] = entry[head];
    }
  }
}

}  // namespace

void fold_blocks(const PageTableView& pages, const BlockTableView& blocks, RowOrder order,
                 const OutputView<std::int32_t>& out) {
  for (std::size_t request = 0; request < blocks.num_requests; ++request) {
    const std::int32_t* row = blocks.data + request * blocks.stride;
    for (std::size_t column = 0; column < blocks.columns; ++column) {
      // A negative id becomes a huge one.
      if (static_cast<std::uint32_t>(row[column]) >= pages.num_blocks) no_such_block(row[column], pages.num_blocks);
    }
  }
  const bool by_request = order == RowOrder::kRequestMajor;
  const std::size_t request_stride = (by_request ? pages.kv_heads : 1) * out.row_stride;
  const std::size_t head_stride = (by_request ? 1 : blocks.num_requests) * out.row_stride;
  auto* fold = &fold_request<0>;
  switch (pages.kv_heads) {
    case 1:
      fold = &fold_request<1>;
      break;
    case 2:
      fold = &fold_request<2>;
      break;
    case 4:
      fold = &fold_request<4>;
      break;
    case 8:
      fold = &fold_request<8>;
      break;
    default:
      break;
  }
  for (std::size_t request = 0; request < blocks.num_requests; ++request) {
    fold(pages, blocks.data + request * blocks.stride, blocks.columns, out.data + request * request_stride,
         out.layer_stride, head_stride);
  }
}

void fold_slots(const PageTableView& pages, const std::int64_t* slot_mapping, std::size_t tokens,
                std::int64_t block_tokens, std::int64_t* out, std::size_t layer_stride) {
  const std::size_t heads = pages.kv_heads;
  for (std::size_t token = 0; token < tokens; ++token) {
    const std::int64_t slot = slot_mapping[token];
    if (slot >= 0 && static_cast<std::uint64_t>(slot / block_tokens) >= pages.num_blocks)
      no_such_block(slot / block_tokens, pages.num_blocks);
  }
  for (std::size_t token = 0; token < tokens; ++token) {
    const std::int64_t slot = slot_mapping[token];
    std::int64_t* column = out + token * heads;
    if (slot < 0) {
      for (std::size_t layer = 0; layer < pages.layers; ++layer)
        for (std::size_t head = 0; head < heads; ++head) column[layer * layer_stride + head] = -1;
      continue;
    }
    const std::int64_t offset = slot % block_tokens;
    const std::int32_t* entry = pages.data + static_cast<std::size_t>(slot / block_tokens) * pages.layers * heads;
    for (std::size_t layer = 0; layer < pages.layers; ++layer)
      for (std::size_t head = 0; head < heads; ++head)
        column[layer * layer_stride + head] = entry[layer * heads + head] * block_tokens + offset;
  }
}

}  // namespace muxserve::memory
