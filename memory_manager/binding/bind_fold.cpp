#include "binding.hpp"
#include "fold/fold.hpp"

namespace muxserve::memory::python {
namespace {

using PageTable = nb::ndarray<const std::int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using BlockTable = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;
using SlotMapping = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FoldedTable = nb::ndarray<std::int32_t, nb::ndim<3>, nb::device::cpu>;
using FoldedSlots = nb::ndarray<std::int64_t, nb::ndim<2>, nb::device::cpu>;

PageTableView view(const PageTable& table) { return {table.data(), table.shape(0), table.shape(1), table.shape(2)}; }

void fold(const PageTable& page_table, const BlockTable& block_table, std::size_t num_reqs, std::size_t nb_columns,
          const FoldedTable& out, RowOrder order) {
  const PageTableView pages = view(page_table);
  if (num_reqs > block_table.shape(0) || nb_columns > block_table.shape(1))
    throw nb::value_error("the block table has fewer than num_reqs rows or nb columns");
  if (out.shape(0) != pages.layers || out.shape(1) != num_reqs * pages.kv_heads || out.shape(2) != nb_columns)
    throw nb::value_error("out must have the shape [layers, num_reqs * kv_heads, nb]");
  if (num_reqs == 0 || nb_columns == 0) return;
  if ((nb_columns > 1 && (block_table.stride(1) != 1 || out.stride(2) != 1)) || block_table.stride(0) < 0 ||
      out.stride(0) < 0 || out.stride(1) < 0)
    throw nb::value_error("the last dimension of block_table and of out must be contiguous");
  const BlockTableView blocks{block_table.data(), num_reqs, nb_columns,
                              static_cast<std::size_t>(block_table.stride(0))};
  const nb::gil_scoped_release released;
  fold_blocks(pages, blocks, order,
              {out.data(), static_cast<std::size_t>(out.stride(0)), static_cast<std::size_t>(out.stride(1))});
}

}  // namespace

void bind_fold(nb::module_& module) {
  module.def(
      "fold_decode",
      [](const PageTable& page_table, const BlockTable& block_table, std::size_t num_reqs, std::size_t columns,
         const FoldedTable& out) { fold(page_table, block_table, num_reqs, columns, out, RowOrder::kRequestMajor); },
      nb::arg("page_table").noconvert(), nb::arg("block_table").noconvert(), nb::arg("num_reqs"), nb::arg("nb"),
      nb::arg("out").noconvert(),
      "out[l, r * kv_heads + h, j] = page_table[block_table[r, j], l, h] for r < num_reqs and j < nb.\n\n"
      "page_table: int32[num_blocks, layers, kv_heads]; block_table: int32[at least num_reqs, at least nb];\n"
      "out: int32[layers, num_reqs * kv_heads, nb]. IndexError for a block that the page table does not have.");
  module.def(
      "fold_prefill",
      [](const PageTable& page_table, const BlockTable& block_table, std::size_t num_reqs, std::size_t columns,
         const FoldedTable& out) { fold(page_table, block_table, num_reqs, columns, out, RowOrder::kHeadMajor); },
      nb::arg("page_table").noconvert(), nb::arg("block_table").noconvert(), nb::arg("num_reqs"), nb::arg("nb"),
      nb::arg("out").noconvert(),
      "As fold_decode with the heads outside: out[l, h * num_reqs + r, j] = page_table[block_table[r, j], l, h].");
  module.def(
      "fold_slots",
      [](const PageTable& page_table, const SlotMapping& slot_mapping, std::int64_t block_tokens,
         const FoldedSlots& out) {
        const PageTableView pages = view(page_table);
        if (block_tokens < 1) throw nb::value_error("block_tokens must be at least 1");
        if (out.shape(0) != pages.layers || out.shape(1) != slot_mapping.shape(0) * pages.kv_heads)
          throw nb::value_error("out must have the shape [layers, tokens * kv_heads]");
        if (slot_mapping.shape(0) == 0) return;
        if ((out.shape(1) > 1 && out.stride(1) != 1) || out.stride(0) < 0)
          throw nb::value_error("the last dimension of out must be contiguous");
        const nb::gil_scoped_release released;
        fold_slots(pages, slot_mapping.data(), slot_mapping.shape(0), block_tokens, out.data(),
                   static_cast<std::size_t>(out.stride(0)));
      },
      nb::arg("page_table").noconvert(), nb::arg("slot_mapping").noconvert(), nb::arg("block_tokens"),
      nb::arg("out").noconvert(),
      "out[l, t * kv_heads + h] = page * block_tokens + offset of slot_mapping[t], -1 where it is negative.\n\n"
      "slot_mapping: int64[tokens] of block * block_tokens + offset; out: int64[layers, tokens * kv_heads].\n"
      "IndexError for a block that the page table does not have.");
}

}  // namespace muxserve::memory::python
