// Block tables and slot mappings of head-folded attention.
//
// The attention kernel sees every (request, KV head) as a sequence of its own with one KV head, in the address space of
// pages. These loops turn what vLLM's runner counts in (blocks) into what the kernel reads (pages), for all layers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muxserve::memory {

// int32[num_blocks, layers, kv_heads], contiguous.
struct PageTableView {
  const std::int32_t* data;
  std::size_t num_blocks;
  std::size_t layers;
  std::size_t kv_heads;
};

// int32[num_requests, columns] with `stride` elements from row to row: the blocks of each request.
struct BlockTableView {
  const std::int32_t* data;
  std::size_t num_requests;
  std::size_t columns;
  std::size_t stride;
};

// [layers, rows, columns] with unit stride in the last dimension.
template <class T>
struct OutputView {
  T* data;
  std::size_t layer_stride;
  std::size_t row_stride;
};

enum class RowOrder {
  kRequestMajor,  // row = request * kv_heads + head: decode, where folding is a view of the query
  kHeadMajor,     // row = head * num_requests + request: prefill
};

// out[l, row(r, h), j] = page_table[block_table[r, j], l, h]. Throws std::out_of_range for a block id that the page
// table does not have, and then nothing has been written.
void fold_blocks(const PageTableView& pages, const BlockTableView& blocks, RowOrder order,
                 const OutputView<std::int32_t>& out);

// out[l, t * kv_heads + h] = page_table[slot / block_tokens, l, h] * block_tokens + slot % block_tokens, or -1 where
// slot_mapping[t] is negative (padding). Throws as fold_blocks does.
void fold_slots(const PageTableView& pages, const std::int64_t* slot_mapping, std::size_t tokens,
                std::int64_t block_tokens, std::int64_t* out, std::size_t layer_stride);

}  // namespace muxserve::memory
