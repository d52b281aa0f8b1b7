// Descriptions and statistics of a manager as JSON.
#include "json.hpp"
#include "manager.hpp"

namespace muxserve::memory {

std::string Manager::describe(const PoolHandles& pool_handles) const {
  json::Writer out;
  out.open_object();
  out.member("generation", std::to_string(generation_)).member("prefix", config_.prefix);
  out.key("pools").open_array();
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const PoolConfig& pool = pools_[i]->config();
    out.open_object().member("index", i).member("name", pool.name).member("page_bytes", pool.page_bytes);
    out.member("num_pages", pool.num_pages).key("handles").open_array();
    if (i < pool_handles.size())
      for (const std::string& handle : pool_handles[i]) out.value(handle);
    out.close_array().close_object();
  }
  out.close_array();
  out.key("models").open_array();
  for (const auto& model : models_) {
    if (!model) continue;
    const ModelConfig& config = model->config();
    out.open_object().member("index", model->index()).member("name", config.name).member("pool", config.pool);
    out.member("pool_index", model->pool_index()).member("layers", config.layers);
    out.member("kv_heads", config.kv_heads).member("num_blocks", config.num_blocks);
    out.member("quota_pages", config.quota_pages).member("table", segments_.table_name(model->index()));
    out.close_object();
  }
  out.close_array();
  return out.close_object().text();
}

std::string Manager::statistics() const {
  json::Writer out;
  out.open_object().member("generation", std::to_string(generation_));
  std::vector<ModelStatistics> numbers(models_.size());
  for (const auto& model : models_)
    if (model) numbers[model->index()] = model->statistics();

  out.key("pools").open_array();
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const PagePool& pool = *pools_[i];
    std::int64_t owned = 0, handed = 0;
    for (const auto& model : models_) {
      if (!model || model->pool_index() != i) continue;
      owned += numbers[model->index()].owned_pages;
      handed += numbers[model->index()].handed_pages;
    }
    out.open_object().member("name", pool.config().name).member("page_bytes", pool.config().page_bytes);
    out.member("total_pages", pool.config().num_pages).member("free_pages", pool.free_pages());
    out.member("owned_pages", owned).member("handed_pages", handed).member("cached_pages", pool.cached_pages());
    out.member("room_pages", pool.chunks().room_pages()).member("backed_pages", pool.chunks().backed_pages());
    out.close_object();
  }
  out.close_array();

  out.key("models").open_array();
  for (const auto& model : models_) {
    if (!model) continue;
    const ModelStatistics& n = numbers[model->index()];
    const ModelConfig& config = model->config();
    out.open_object().member("name", config.name).member("index", model->index()).member("pool", config.pool);
    out.member("pages_per_block", config.pages_per_block()).member("num_blocks", config.num_blocks);
    out.member("quota_pages", config.quota_pages).member("used_pages", model->used_pages());
    out.member("owned_pages", n.owned_pages).member("handed_pages", n.handed_pages);
    out.member("cached_pages", n.cached_pages).member("published_blocks", n.published);
    out.member("evicted_blocks", n.evictions).member("lookups", n.lookups).member("hits", n.hits);
    out.member("hand_offs", n.hand_offs).member("expired_hand_offs", n.expired);
    out.key("hand_off_keys").open_array();
    for (const std::string& key : model->hand_offs().keys()) out.value(key);
    out.close_array();
    out.close_object();
  }
  out.close_array();

  out.key("clients").open_array();
  for (int slot = 0; slot < kMaxClients; ++slot) {
    const auto& client = clients_[static_cast<std::size_t>(slot)];
    if (!client) continue;
    std::int64_t held = 0;
    for (const auto& model : models_)
      if (model) held += model->held_pages(slot);
    out.open_object().member("id", slot).member("name", client->name).member("pid", client->pid);
    out.member("held_pages", held).close_object();
  }
  out.close_array();
  return out.close_object().text();
}

}  // namespace muxserve::memory
