#include "binding.hpp"
#include "hibernation/hibernation.hpp"

namespace muxserve::memory::python {

void bind_hibernation(nb::module_& module) {
  nb::class_<Hibernation>(module, "Hibernation", "Memory of this process that moves behind a file.")
      .def(nb::init<int, std::size_t>(), nb::arg("fd"), nb::arg("min_bytes"),
           "fd: an empty file that only this object writes to, and that stays open.\n"
           "min_bytes: what is not behind the file yet moves in pieces of at least so many bytes.")
      .def(
          "move",
          [](Hibernation& hibernation, double seconds) {
            const auto moved = hibernation.move(seconds);
            return std::make_pair(moved.bytes, moved.all);
          },
          nb::arg("seconds"),
          "Move private memory that no other process shares, for so long at most. Returns how many bytes have moved,\n"
          "and whether that is all.\n\n"
          "RuntimeError: the process has other threads, the kernel does not show it its pages, or the file does not\n"
          "take more. Everything is readable then, too.")
      .def_prop_ro("file_bytes", &Hibernation::file_bytes, "Bytes of the file that are in use.");
}

}  // namespace muxserve::memory::python
