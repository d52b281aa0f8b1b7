#include <array>
#include <memory>
#include <string>

#include "binding.hpp"
#include "client/chunk_mapping.hpp"
#include "client/cuda_mapping.hpp"
#include "cuda_memory.hpp"
#include "export_server.hpp"

namespace muxserve::memory::python {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;

// Memory of one GPU that is exported as a file descriptor, as pools are, and that nobody keeps but who has the
// descriptor or a mapping.
class ExportedMemory {
 public:
  ExportedMemory(const std::string& uuid, std::size_t bytes)
      : store_(-1), memory_(cuda::Driver::get(), uuid, bytes, "weights", store_), descriptor_(memory_.descriptor()) {}

  std::string handle() const { return memory_.handle(); }
  int descriptor() const { return descriptor_.get(); }

 private:
  FdStore store_;
  VmmPoolMemory memory_;
  Descriptor descriptor_;
};

}  // namespace

void bind_cuda(nb::module_& module) {
  nb::class_<CudaMapping>(module, "CudaMapping")
      .def(
          "__init__",
          [](CudaMapping* self, const std::string& handle, int descriptor, bool read_only) {
            new (self) CudaMapping(handle, Descriptor(descriptor), read_only);
          },
          nb::arg("handle"), nb::arg("descriptor") = -1, nb::arg("read_only") = false, Release())
      .def("unmap", &CudaMapping::unmap, Release())
      .def(
          "map_again",
          [](CudaMapping& self, const std::string& handle, int descriptor) {
            self.map_again(handle, Descriptor(descriptor));
          },
          nb::arg("handle"), nb::arg("descriptor"), Release())
      .def_prop_ro("address", &CudaMapping::address)
      .def_prop_ro("bytes", &CudaMapping::bytes)
      .def_prop_ro("handle", &CudaMapping::handle)
      .def_prop_ro("device_uuid", &CudaMapping::device_uuid)
      .def_prop_ro("read_only", &CudaMapping::read_only)
      .def_prop_ro("mapped", &CudaMapping::mapped);

  nb::class_<ChunkMapping>(module, "ChunkMapping")
      .def(nb::init<const std::string&, const std::string&, std::size_t, std::size_t>(), nb::arg("handle"),
           nb::arg("manager_socket"), nb::arg("pool"), nb::arg("rank"), Release())
      .def("sync", &ChunkMapping::sync, Release())
      .def_prop_ro("address", &ChunkMapping::address)
      .def_prop_ro("bytes", &ChunkMapping::bytes)
      .def_prop_ro("handle", &ChunkMapping::handle)
      .def_prop_ro("device_uuid", &ChunkMapping::device_uuid)
      .def_prop_ro("mapped", &ChunkMapping::mapped);

  nb::class_<ExportedMemory>(module, "ExportedMemory")
      .def(nb::init<const std::string&, std::size_t>(), nb::arg("uuid"), nb::arg("bytes"), Release())
      .def_prop_ro("handle", &ExportedMemory::handle)
      .def_prop_ro("descriptor", &ExportedMemory::descriptor);

  module.def(
      "exports_memory",
      [](const std::string& uuid) {
        const cuda::Driver& driver = cuda::Driver::get();
        return exports_memory(driver, driver.device(uuid));
      },
      nb::arg("uuid"), Release());

  // The descriptor is the caller's.
  module.def(
      "pool_descriptor",
      [](const std::string& manager_socket, std::size_t pool, std::size_t rank) {
        return ask_for_descriptor(ExportServer::path_for(manager_socket), pool, rank).release();
      },
      nb::arg("manager_socket"), nb::arg("pool"), nb::arg("rank"), Release());
}

}  // namespace muxserve::memory::python
