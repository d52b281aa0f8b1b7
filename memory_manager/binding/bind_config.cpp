// The manager's configuration, made in Python and encoded here, where it is decoded, too.
#include "binding.hpp"
#include "protocol.hpp"

namespace muxserve::memory::python {
namespace {

void make_pool(PoolConfig* self, const std::string& name, std::int64_t page_bytes, std::int64_t num_pages,
               std::int64_t chunk_bytes, std::int64_t start_pages) {
  new (self) PoolConfig{name, page_bytes, num_pages, chunk_bytes, start_pages};
}

void make_model(ModelConfig* self, const std::string& name, const std::string& pool, std::int64_t layers,
                std::int64_t kv_heads, std::int64_t num_blocks, std::int64_t quota_pages,
                const std::vector<std::int64_t>& windowed_layers, std::int64_t window_blocks) {
  new (self) ModelConfig{name, pool, layers, kv_heads, num_blocks, quota_pages, windowed_layers, window_blocks};
}

void make_config(Config* self, const std::string& prefix, std::int64_t ranks, const std::string& device,
                 const std::vector<std::string>& devices, const std::string& ipc, const std::vector<PoolConfig>& pools,
                 const std::vector<ModelConfig>& models) {
  new (self) Config{prefix, ranks, device, devices, ipc, pools, models};
}

nb::bytes encode(const Config& config) {
  const Bytes file = encode_config(config);
  return nb::bytes(file.data(), file.size());
}

}  // namespace

void bind_config(nb::module_& module) {
  nb::class_<PoolConfig>(module, "PoolConfig")
      .def("__init__", &make_pool, nb::arg("name"), nb::arg("page_bytes"), nb::arg("num_pages"),
           nb::arg("chunk_bytes") = 0, nb::arg("start_pages") = 0);

  nb::class_<ModelConfig>(module, "ModelConfig")
      .def("__init__", &make_model, nb::arg("name"), nb::arg("pool"), nb::arg("layers"), nb::arg("kv_heads"),
           nb::arg("num_blocks"), nb::arg("quota_pages"), nb::arg("windowed_layers") = std::vector<std::int64_t>(),
           nb::arg("window_blocks") = 0)
      .def_ro("windowed_layers", &ModelConfig::windowed_layers)
      .def_ro("window_blocks", &ModelConfig::window_blocks);

  nb::class_<Config>(module, "Config")
      .def("__init__", &make_config, nb::arg("prefix"), nb::arg("ranks"), nb::arg("device"), nb::arg("devices"),
           nb::arg("ipc"), nb::arg("pools"), nb::arg("models"))
      .def_rw("prefix", &Config::prefix)
      .def_ro("models", &Config::models)
      .def("encode", &encode);
}

}  // namespace muxserve::memory::python
