#include "binding.hpp"
#include "pages/pages.hpp"

namespace muxserve::memory::python {
namespace {

using Pool = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ReadOnlyPool = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Buffer = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadOnlyBuffer = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

PoolView<std::uint8_t> written(const Pool& pool) { return {pool.data(), pool.shape(0), pool.shape(1)}; }
PoolView<const std::uint8_t> read(const ReadOnlyPool& pool) { return {pool.data(), pool.shape(0), pool.shape(1)}; }

}  // namespace

void bind_pages(nb::module_& module) {
  module.def(
      "copy_pages",
      [](const ReadOnlyPool& source, const BlockIds& from, const Pool& destination, const BlockIds& to) {
        const nb::gil_scoped_release released;
        copy_pages(read(source), view(from), written(destination), view(to));
      },
      nb::arg("source").noconvert(), nb::arg("source_pages").noconvert(), nb::arg("destination").noconvert(),
      nb::arg("destination_pages").noconvert(),
      "destination[destination_pages[i]] = source[source_pages[i]] for pools uint8[pages, page_bytes].\n\n"
      "IndexError for a page that a pool does not have, or page 0 as destination; nothing is written then.\n"
      "No destination page may be named twice.");
  module.def(
      "gather_pages",
      [](const ReadOnlyPool& source, const BlockIds& pages, const Buffer& out) {
        const nb::gil_scoped_release released;
        gather_pages(read(source), view(pages), out.data(), out.size());
      },
      nb::arg("source").noconvert(), nb::arg("pages").noconvert(), nb::arg("out").noconvert(),
      "out[i] = source[pages[i]]; out: uint8[pages * page_bytes]. Errors as of copy_pages.");
  module.def(
      "scatter_pages",
      [](const ReadOnlyBuffer& data, const Pool& destination, const BlockIds& pages) {
        const nb::gil_scoped_release released;
        scatter_pages(data.data(), data.size(), written(destination), view(pages));
      },
      nb::arg("data").noconvert(), nb::arg("destination").noconvert(), nb::arg("pages").noconvert(),
      "destination[pages[i]] = data[i]; data: uint8[pages * page_bytes]. Errors as of copy_pages.");
}

}  // namespace muxserve::memory::python
