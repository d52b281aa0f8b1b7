// muxserve.memory._native: the Python side of the memory manager's C++.
#include "binding.hpp"
#include "client/client.hpp"
#include "client/mapping.hpp"
#include "config.hpp"
#include "cuda_driver.hpp"
#include "errors.hpp"
#include "export_server.hpp"

namespace muxserve::memory::python {
namespace {

void raise_python(const char* type_name, const nb::object& exception_arguments) {
  const nb::object type = nb::module_::import_("muxserve.memory.errors").attr(type_name);
  const nb::object error = type(*nb::borrow<nb::args>(exception_arguments));
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Refused& refused) {
    raise_python("MemoryManagerError", nb::make_tuple(code_name(refused.code()), refused.what()));
  } catch (const Gone& gone) {
    raise_python("MemoryManagerGone", nb::make_tuple(gone.what()));
  } catch (const muxserve::cuda::DriverError& error) {
    raise_python("DeviceMemoryError", nb::make_tuple(error.what()));
  } catch (const ExportError& error) {
    raise_python("MemoryManagerGone", nb::make_tuple(error.what()));
  } catch (const MappingError& error) {
    raise_python("MemoryManagerGone", nb::make_tuple(error.what()));
  } catch (const ConfigError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
}

}  // namespace

std::size_t append_hashes(nb::handle source, std::vector<Hash>& out) {
  const auto append = [&out](nb::handle item) {
    const auto bytes = nb::cast<nb::bytes>(item);
    if (bytes.size() % kHashBytes != 0) throw nb::value_error("a block hash has 32 bytes");
    const std::size_t count = bytes.size() / kHashBytes;
    const std::size_t before = out.size();
    out.resize(before + count);
    if (count > 0) std::memcpy(out.data() + before, bytes.c_str(), bytes.size());
    return count;
  };
  if (nb::isinstance<nb::bytes>(source)) return append(source);
  std::size_t count = 0;
  for (const nb::handle item : nb::borrow<nb::iterable>(source)) {
    if (append(item) != 1) throw nb::value_error("a block hash has 32 bytes");
    ++count;
  }
  return count;
}

StepRequest StepArguments::request(std::uint32_t model, const BlockIds& release, const BlockIds& publish,
                                   nb::handle hashes, nb::handle lookups, std::uint32_t reserve, bool partial) {
  publish_hashes.clear();
  lookup_hashes.clear();
  lookup_lengths.clear();
  if (append_hashes(hashes, publish_hashes) != publish.shape(0))
    throw nb::value_error("every published block needs exactly one hash");
  for (const nb::handle lookup : nb::borrow<nb::iterable>(lookups))
    lookup_lengths.push_back(static_cast<std::uint32_t>(append_hashes(lookup, lookup_hashes)));
  StepRequest result;
  result.model = model;
  result.release = view(release);
  result.publish = view(publish);
  result.publish_hashes = publish_hashes;
  result.lookup_lengths = lookup_lengths;
  result.lookup_hashes = lookup_hashes;
  result.reserve = reserve;
  result.partial = partial;
  return result;
}

nb::tuple step_result(const StepReply& reply) {
  if (reply.hit_lengths.empty()) return nb::make_tuple(new_array(reply.reserved), nb::none(), nb::none());
  return nb::make_tuple(new_array(reply.reserved), new_array(reply.hits), nb::cast(reply.hit_lengths));
}

}  // namespace muxserve::memory::python

NB_MODULE(_native, module) {
  using namespace muxserve::memory::python;
  module.doc() = "C++ parts of muxserve.memory";
  nb::register_exception_translator(translate);
  module.attr("MAX_CLIENTS") = muxserve::memory::kMaxClients;
  module.attr("MAX_PAYLOAD") = muxserve::memory::kMaxPayload;
  bind_client(module);
  bind_config(module);
  bind_cuda(module);
  bind_manager(module);
  bind_fold(module);
  bind_pages(module);
}
