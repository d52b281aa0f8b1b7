// What the parts of the extension module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "manager.hpp"

namespace muxserve::memory::python {

namespace nb = nanobind;

using BlockIds = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewBlockIds = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;

inline Span<std::int32_t> view(const BlockIds& ids) { return {ids.data(), ids.shape(0)}; }

// A new numpy array of its own memory.
inline NewBlockIds new_array(Span<std::int32_t> ids) {
  auto* data = new std::int32_t[ids.size() + 1];
  if (!ids.empty()) std::memcpy(data, ids.data(), ids.size() * sizeof(std::int32_t));
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int32_t*>(p); });
  const std::size_t shape[1] = {ids.size()};
  return NewBlockIds(data, 1, shape, owner);
}

// Appends 32-byte hashes: either one bytes object of n * 32 bytes or a sequence of bytes objects of 32 bytes.
// Returns how many. Throws nb::value_error.
std::size_t append_hashes(nb::handle source, std::vector<Hash>& out);

// The arguments of a step in C++ form. Kept from call to call by its owner, so that a step allocates nothing.
struct StepArguments {
  std::vector<Hash> publish_hashes;
  std::vector<Hash> lookup_hashes;
  std::vector<std::uint32_t> lookup_lengths;

  StepRequest request(std::uint32_t model, const BlockIds& release, const BlockIds& publish, nb::handle hashes,
                      nb::handle lookups, std::uint32_t reserve, bool partial);
};

// (reserved, hits, lengths of hits by lookup); hits is None where nothing was looked up.
nb::tuple step_result(const StepReply& reply);

void bind_client(nb::module_& module);
void bind_config(nb::module_& module);
void bind_cuda(nb::module_& module);
void bind_manager(nb::module_& module);
void bind_fold(nb::module_& module);
void bind_pages(nb::module_& module);

}  // namespace muxserve::memory::python
