#include "config.hpp"

#include <algorithm>
#include <numeric>

#include "text.hpp"

namespace muxserve::memory {
namespace {

void check_range(const std::string& where, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    throw ConfigError(where + ": " + std::to_string(value) + " is not between " + std::to_string(low) + " and " +
                      std::to_string(high));
  }
}

void check_name(const std::string& where, const std::string& name) {
  const std::string problem = name_problem(name, kMaxNameBytes);
  if (!problem.empty()) throw ConfigError(where + ": the name " + problem);
}

}  // namespace

std::int64_t PoolConfig::pages_of_a_chunk() const {
  if (chunk_bytes == 0) return num_pages;
  return std::min(num_pages, chunk_bytes / std::gcd(page_bytes, chunk_bytes));
}

void check_model(const ModelConfig& model) {
  check_name("models: name", model.name);
  const std::string where = "model \"" + model.name + "\": ";
  check_range(where + "layers", model.layers, 1, kMaxPagesPerBlock);
  check_range(where + "kv_heads", model.kv_heads, 1, kMaxPagesPerBlock);
  check_range(where + "layers * kv_heads", model.layers * model.kv_heads, 1, kMaxPagesPerBlock);
  check_range(where + "num_blocks", model.num_blocks, 2, kMaxBlocks);
  check_range(where + "quota_pages", model.quota_pages, 0, kMaxPages);
  check_name(where + "pool", model.pool);
  for (std::size_t i = 0; i < model.windowed_layers.size(); ++i)
    check_range(where + "windowed_layers, ascending", model.windowed_layers[i],
                i == 0 ? 0 : model.windowed_layers[i - 1] + 1, model.layers - 1);
  const bool windowed = !model.windowed_layers.empty();
  check_range(where + "window_blocks", model.window_blocks, windowed ? 1 : 0, windowed ? kMaxBlocks : 0);
}

void check_table(const ModelConfig& model, const PoolConfig& pool) {
  // Neither product overflows: kMaxBlocks * kMaxPagesPerBlock is 2^40.
  const std::int64_t most = pool.num_pages * kMaxTableEntriesPerPage;
  if (model.table_entries() > most) {
    throw ConfigError("model \"" + model.name + "\": num_blocks: " + std::to_string(model.num_blocks) + " blocks of " +
                      std::to_string(model.pages_per_block()) + " pages are more than pool \"" + pool.name +
                      "\" can ever fill: it has " + std::to_string(pool.num_pages) + " pages, so at most " +
                      std::to_string(most / model.pages_per_block()) + " blocks are allowed");
  }
}

void check_config(const Config& config) {
  if (config.prefix.empty() || config.prefix.size() > 200 ||
      config.prefix.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") !=
          std::string::npos) {
    throw ConfigError("prefix: 1 to 200 letters, digits, '-' and '_' are needed, got \"" + config.prefix + "\"");
  }
  check_range("ranks", config.ranks, 1, kMaxRanks);
  if (config.device != "posix" && config.device != "cuda")
    throw ConfigError("device: \"posix\" or \"cuda\" is needed, got \"" + config.device + "\"");
  const std::size_t gpus = config.device == "cuda" ? static_cast<std::size_t>(config.ranks) : 0;
  if (config.devices.size() != gpus) {
    throw ConfigError("devices: " + std::to_string(gpus) + " are needed, one per rank with \"cuda\", got " +
                      std::to_string(config.devices.size()));
  }
  if (config.ipc != "auto" && config.ipc != "vmm" && config.ipc != "legacy")
    throw ConfigError("ipc: \"auto\", \"vmm\" or \"legacy\" is needed, got \"" + config.ipc + "\"");
  if (config.pools.empty()) throw ConfigError("pools: at least one pool is needed");
  if (config.pools.size() > kMaxPools)
    throw ConfigError("pools: at most " + std::to_string(kMaxPools) + " are allowed");
  if (config.models.size() > kMaxModels)
    throw ConfigError("models: at most " + std::to_string(kMaxModels) + " are allowed");

  for (std::size_t i = 0; i < config.pools.size(); ++i) {
    const PoolConfig& pool = config.pools[i];
    check_name("pools[" + std::to_string(i) + "].name", pool.name);
    const std::string where = "pool \"" + pool.name + "\": ";
    check_range(where + "page_bytes", pool.page_bytes, 1, kMaxPoolBytes);
    check_range(where + "num_pages", pool.num_pages, 2, kMaxPages);
    check_range(where + "chunk_bytes", pool.chunk_bytes, 0, kMaxPoolBytes);
    check_range(where + "start_pages", pool.start_pages, 0, pool.num_pages);
    if (pool.num_pages > kMaxPoolBytes / pool.page_bytes)
      throw ConfigError(where + "num_pages * page_bytes is more than a process can address");
    for (std::size_t j = 0; j < i; ++j)
      if (config.pools[j].name == pool.name) throw ConfigError(where + "the name is used twice");
  }
  for (std::size_t i = 0; i < config.models.size(); ++i) {
    const ModelConfig& model = config.models[i];
    check_model(model);
    const std::string where = "model \"" + model.name + "\": ";
    for (std::size_t j = 0; j < i; ++j)
      if (config.models[j].name == model.name) throw ConfigError(where + "the name is used twice");
    const auto pool = std::find_if(config.pools.begin(), config.pools.end(),
                                   [&](const auto& each) { return each.name == model.pool; });
    if (pool == config.pools.end()) throw ConfigError(where + "there is no pool \"" + model.pool + "\"");
    check_table(model, *pool);
  }
  for (const PoolConfig& pool : config.pools) {
    std::int64_t sum = 0;
    for (const ModelConfig& model : config.models)
      if (model.pool == pool.name) sum += model.quota_pages;
    if (sum > pool.num_pages) {
      throw ConfigError("pool \"" + pool.name + "\": the quotas of its models sum to " + std::to_string(sum) +
                        " pages, more than the pool's " + std::to_string(pool.num_pages));
    }
  }
}

}  // namespace muxserve::memory
