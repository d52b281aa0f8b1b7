#include "binding.hpp"
#include "client/client.hpp"
#include "client/mapping.hpp"

namespace muxserve::memory::python {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;
using SharedMapping = std::shared_ptr<Mapping>;

// What one thread keeps from step to step. By thread, because steps of several threads are prepared at the same time.
struct Scratch {
  StepArguments arguments;
  StepReply reply;
};

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

nb::tuple step(Client& client, std::uint32_t model, const BlockIds& release, const BlockIds& publish, nb::handle hashes,
               nb::handle lookups, std::uint32_t reserve, bool partial) {
  Scratch& mine = scratch();
  const StepRequest request = mine.arguments.request(model, release, publish, hashes, lookups, reserve, partial);
  {
    const nb::gil_scoped_release released;
    client.step(request, mine.reply);
  }
  return step_result(mine.reply);
}

void post(Client& client, std::uint32_t model, const BlockIds& release, const BlockIds& publish, nb::handle hashes) {
  const StepRequest request = scratch().arguments.request(model, release, publish, hashes, nb::make_tuple(), 0, false);
  const nb::gil_scoped_release released;
  client.post(request);
}

NewBlockIds adopt(Client& client, std::uint32_t model, const std::string& key) {
  std::vector<std::int32_t> blocks;
  {
    const nb::gil_scoped_release released;
    blocks = client.adopt(model, key);
  }
  return new_array(blocks);
}

// Keeps the mapping alive as long as the array.
nb::capsule keep(const SharedMapping& mapping) {
  return nb::capsule(new SharedMapping(mapping), [](void* p) noexcept { delete static_cast<SharedMapping*>(p); });
}

void check_size(const SharedMapping& mapping, const std::vector<std::size_t>& shape, std::size_t item) {
  for (const std::size_t extent : shape) item *= extent;
  if (item > mapping->bytes()) throw nb::value_error("the mapping is smaller than the array");
}

auto table(const SharedMapping& mapping, std::size_t blocks, std::size_t layers, std::size_t heads) {
  check_size(mapping, {blocks, layers, heads}, sizeof(std::int32_t));
  return nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<3>>(mapping->data(), {blocks, layers, heads},
                                                                 keep(mapping));
}

auto pages(const SharedMapping& mapping, std::size_t num_pages, std::size_t page_bytes) {
  check_size(mapping, {num_pages, page_bytes}, 1);
  return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>>(mapping->data(), {num_pages, page_bytes}, keep(mapping));
}

}  // namespace

void bind_client(nb::module_& module) {
  nb::class_<Client>(module, "Client")
      .def(nb::init<const std::string&, const std::string&, double>(), nb::arg("path"), nb::arg("name"),
           nb::arg("timeout_s"), Release())
      .def_prop_ro("generation", &Client::generation)
      .def_prop_ro("client_id", &Client::client_id)
      .def_prop_ro("description", &Client::description)
      .def_prop_ro("connected", &Client::connected)
      .def("close", &Client::close, Release())
      .def("step", &step, nb::arg("model"), nb::arg("release").noconvert(), nb::arg("publish").noconvert(),
           nb::arg("hashes"), nb::arg("lookups"), nb::arg("reserve"), nb::arg("partial"))
      .def("post", &post, nb::arg("model"), nb::arg("release").noconvert(), nb::arg("publish").noconvert(),
           nb::arg("hashes"))
      .def(
          "hand_off",
          [](Client& client, std::uint32_t model, const std::string& key, const BlockIds& blocks,
             const BlockIds& release, double ttl_s) {
            const nb::gil_scoped_release released;
            client.hand_off(model, key, view(blocks), view(release), ttl_s);
          },
          nb::arg("model"), nb::arg("key"), nb::arg("blocks").noconvert(), nb::arg("release").noconvert(),
          nb::arg("ttl_s"))
      .def(
          "leave_window",
          [](Client& client, std::uint32_t model, const BlockIds& blocks) {
            const nb::gil_scoped_release released;
            client.leave_window(model, view(blocks));
          },
          nb::arg("model"), nb::arg("blocks").noconvert())
      .def("adopt", &adopt, nb::arg("model"), nb::arg("key"))
      .def("drop", &Client::drop, nb::arg("model"), nb::arg("key"), Release())
      .def("set_quotas", &Client::set_quotas, nb::arg("quotas"), Release())
      .def("set_room", &Client::set_room, nb::arg("pool"), nb::arg("pages"), Release())
      .def("statistics", &Client::statistics, Release())
      .def("describe", &Client::describe, Release())
      .def("reset_cache", &Client::reset_cache, nb::arg("model"), Release())
      .def("add_model", &Client::add_model, nb::arg("model"), Release())
      .def("remove_model", &Client::remove_model, nb::arg("model"), Release());

  nb::class_<SharedMapping>(module, "Mapping")
      .def(
          "__init__",
          [](SharedMapping* self, const std::string& name, std::size_t bytes, bool writable) {
            new (self) SharedMapping(std::make_shared<Mapping>(name, bytes, writable));
          },
          nb::arg("name"), nb::arg("bytes"), nb::arg("writable"))
      .def_prop_ro("current", [](const SharedMapping& mapping) { return mapping->current(); })
      .def_prop_ro("address",
                   [](const SharedMapping& mapping) { return reinterpret_cast<std::uintptr_t>(mapping->data()); })
      .def("page_table", &table, nb::arg("num_blocks"), nb::arg("layers"), nb::arg("kv_heads"))
      .def("pages", &pages, nb::arg("num_pages"), nb::arg("page_bytes"));
  module.attr("COUNTERS_BYTES") = sizeof(Counters);

  nb::class_<CountersView>(module, "CountersView")
      .def(nb::init<SharedMapping, std::size_t, std::size_t, std::int64_t, std::int64_t>(), nb::arg("mapping"),
           nb::arg("pool"), nb::arg("model"), nb::arg("pages_per_block"), nb::arg("num_blocks"))
      .def_prop_ro("free_pages", &CountersView::free_pages)
      .def_prop_ro("pool_cached_pages", &CountersView::pool_cached_pages)
      .def_prop_ro("room_pages", &CountersView::room_pages)
      .def_prop_ro("backed_pages", &CountersView::backed_pages)
      .def_prop_ro("used_pages", &CountersView::used_pages)
      .def_prop_ro("cached_pages", &CountersView::cached_pages)
      .def_prop_ro("quota_pages", &CountersView::quota_pages)
      .def_prop_ro("available_blocks", &CountersView::available_blocks)
      .def_prop_ro("generation", &CountersView::generation);

  nb::class_<WriteGuard>(module, "WriteGuard")
      .def(nb::init<const std::string&, std::uint64_t>(), nb::arg("prefix"), nb::arg("generation"))
      .def("acquire", &WriteGuard::acquire, Release())
      .def("release", &WriteGuard::release, Release());
}

}  // namespace muxserve::memory::python
