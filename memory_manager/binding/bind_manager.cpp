// The core in this process, without sockets or shared memory: for property tests and benchmarks.
#include "binding.hpp"
#include "segments.hpp"

namespace muxserve::memory::python {
namespace {

class LocalManager {
 public:
  explicit LocalManager(const Config& config) : manager_(config, segments_, 1) {}

  Manager& core() { return manager_; }

  int connect(const std::string& name) { return manager_.connect(name, 0); }

  nb::tuple step(int client, std::uint32_t model, const BlockIds& release, const BlockIds& publish, nb::handle hashes,
                 nb::handle lookups, std::uint32_t reserve, bool partial) {
    check_client(client);
    manager_.step(client, arguments_.request(model, release, publish, hashes, lookups, reserve, partial), reply_);
    return step_result(reply_);
  }

  void hand_off(int client, std::uint32_t model, const std::string& key, const BlockIds& blocks,
                const BlockIds& release, std::int64_t ttl_ns, std::int64_t now_ns) {
    check_client(client);
    manager_.hand_off(client, model, key, view(blocks), view(release), ttl_ns, now_ns);
  }

  NewBlockIds adopt(int client, std::uint32_t model, const std::string& key) {
    check_client(client);
    return new_array(manager_.adopt(client, model, key));
  }

  void leave_window(int client, std::uint32_t model, const BlockIds& blocks) {
    check_client(client);
    manager_.leave_window(client, model, view(blocks));
  }

  void disconnect(int client) {
    check_client(client);
    manager_.disconnect(client);
  }

  // A copy, because a table can go away with its model.
  nb::ndarray<nb::numpy, std::int32_t, nb::ndim<3>> page_table(std::uint32_t model) {
    const ModelTable& table = manager_.model(model);
    const auto blocks = static_cast<std::size_t>(table.config().num_blocks);
    const auto layers = static_cast<std::size_t>(table.config().layers);
    const auto heads = static_cast<std::size_t>(table.config().kv_heads);
    auto* data = new std::int32_t[blocks * layers * heads];
    std::memcpy(data, table.table(), blocks * layers * heads * sizeof(std::int32_t));
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int32_t*>(p); });
    return {data, {blocks, layers, heads}, owner};
  }

 private:
  static void check_client(int client) {
    if (client < 0 || client >= kMaxClients) throw nb::value_error("no such client");
  }

  HeapSegments segments_;
  Manager manager_;
  StepArguments arguments_;
  StepReply reply_;
};

}  // namespace

void bind_manager(nb::module_& module) {
  nb::class_<LocalManager>(module, "Manager")
      .def(nb::init<const Config&>(), nb::arg("config"))
      .def("connect", &LocalManager::connect, nb::arg("name"))
      .def("disconnect", &LocalManager::disconnect, nb::arg("client"))
      .def("step", &LocalManager::step, nb::arg("client"), nb::arg("model"), nb::arg("release").noconvert(),
           nb::arg("publish").noconvert(), nb::arg("hashes"), nb::arg("lookups"), nb::arg("reserve"),
           nb::arg("partial"))
      .def("hand_off", &LocalManager::hand_off, nb::arg("client"), nb::arg("model"), nb::arg("key"),
           nb::arg("blocks").noconvert(), nb::arg("release").noconvert(), nb::arg("ttl_ns"), nb::arg("now_ns"))
      .def("leave_window", &LocalManager::leave_window, nb::arg("client"), nb::arg("model"),
           nb::arg("blocks").noconvert())
      .def("adopt", &LocalManager::adopt, nb::arg("client"), nb::arg("model"), nb::arg("key"))
      .def(
          "drop", [](LocalManager& self, std::uint32_t model, const std::string& key) { self.core().drop(model, key); },
          nb::arg("model"), nb::arg("key"))
      .def(
          "expire", [](LocalManager& self, std::int64_t now_ns) { self.core().expire(now_ns); }, nb::arg("now_ns"))
      .def(
          "set_quotas",
          [](LocalManager& self, const std::vector<std::pair<std::uint32_t, std::int64_t>>& quotas) {
            self.core().set_quotas(quotas);
          },
          nb::arg("quotas"))
      .def(
          "set_room",
          [](LocalManager& self, std::uint32_t pool, std::int64_t pages) { self.core().set_room(pool, pages); },
          nb::arg("pool"), nb::arg("pages"))
      .def(
          "reset_cache", [](LocalManager& self, std::uint32_t model) { self.core().reset_cache(model); },
          nb::arg("model"))
      .def(
          "add_model", [](LocalManager& self, const ModelConfig& model) { return self.core().add_model(model); },
          nb::arg("model"))
      .def(
          "remove_model", [](LocalManager& self, std::uint32_t model) { self.core().remove_model(model); },
          nb::arg("model"))
      .def("statistics", [](LocalManager& self) { return self.core().statistics(); })
      .def(
          "check", [](LocalManager& self) { self.core().check(); },
          "Raises RuntimeError unless free + owned + handed + cached pages are the pool and no page is in use twice.")
      .def("page_table", &LocalManager::page_table, nb::arg("model"));
}

}  // namespace muxserve::memory::python
