#include <array>
#include <memory>
#include <string>

#include "binding.hpp"
#include "client/cuda_mapping.hpp"
#include "export_server.hpp"

namespace muxserve::memory::python {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

}  // namespace

void bind_cuda(nb::module_& module) {
  nb::class_<CudaMapping>(module, "CudaMapping")
      .def(
          "__init__",
          [](CudaMapping* self, const std::string& handle, int descriptor) {
            new (self) CudaMapping(handle, Descriptor(descriptor));
          },
          nb::arg("handle"), nb::arg("descriptor") = -1, Release())
      .def_prop_ro("address", &CudaMapping::address)
      .def_prop_ro("bytes", &CudaMapping::bytes)
      .def_prop_ro("handle", &CudaMapping::handle)
      .def_prop_ro("device_uuid", &CudaMapping::device_uuid);

  // The descriptor is the caller's.
  module.def(
      "pool_descriptor",
      [](const std::string& manager_socket, std::size_t pool, std::size_t rank) {
        return ask_for_descriptor(ExportServer::path_for(manager_socket), pool, rank).release();
      },
      nb::arg("manager_socket"), nb::arg("pool"), nb::arg("rank"), Release());
}

}  // namespace muxserve::memory::python
