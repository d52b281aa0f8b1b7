#include "config.hpp"

#include <algorithm>
#include <initializer_list>

#include "json.hpp"
#include "text.hpp"

namespace muxserve::memory {
namespace {

using json::Value;

// Takes the members of one JSON object by name and complains of what is missing or left over.
class Fields {
 public:
  Fields(const Value& value, std::string where, std::initializer_list<const char*> known) : where_(std::move(where)) {
    object_ = value.object();
    if (object_ == nullptr) throw ConfigError(where_ + ": expected an object");
    for (const auto& member : *object_) {
      if (std::find(known.begin(), known.end(), member.first) == known.end())
        throw ConfigError(where_ + ": unknown key \"" + member.first + "\"");
    }
  }

  std::string string(const char* name) const {
    const std::string* found = get(name).string();
    if (found == nullptr) throw ConfigError(where_ + "." + name + ": expected a string");
    return *found;
  }

  std::int64_t integer(const char* name) const {
    const std::int64_t* found = get(name).integer();
    if (found == nullptr) throw ConfigError(where_ + "." + name + ": expected a whole number");
    return *found;
  }

  std::int64_t integer(const char* name, std::int64_t otherwise) const { return has(name) ? integer(name) : otherwise; }

  std::string string(const char* name, const char* otherwise) const { return has(name) ? string(name) : otherwise; }

  std::vector<std::string> strings(const char* name) const {
    std::vector<std::string> values;
    if (!has(name)) return values;
    for (const Value& item : array(name)) {
      if (item.string() == nullptr) throw ConfigError(where_ + "." + name + ": expected strings");
      values.push_back(*item.string());
    }
    return values;
  }

  std::vector<std::int64_t> integers(const char* name) const {
    std::vector<std::int64_t> values;
    if (!has(name)) return values;
    for (const Value& item : array(name)) {
      if (item.integer() == nullptr) throw ConfigError(where_ + "." + name + ": expected whole numbers");
      values.push_back(*item.integer());
    }
    return values;
  }

  const json::Array& array(const char* name) const {
    const json::Array* found = get(name).array();
    if (found == nullptr) throw ConfigError(where_ + "." + name + ": expected a list");
    return *found;
  }

 private:
  bool has(const char* name) const {
    return std::any_of(object_->begin(), object_->end(), [&](const auto& member) { return member.first == name; });
  }

  const Value& get(const char* name) const {
    for (const auto& member : *object_)
      if (member.first == name) return member.second;
    throw ConfigError(where_ + ": key \"" + name + "\" is missing");
  }

  std::string where_;
  const json::Object* object_ = nullptr;
};

ModelConfig read_model(const Value& value, const std::string& where) {
  const Fields fields(
      value, where,
      {"name", "pool", "layers", "kv_heads", "num_blocks", "quota_pages", "windowed_layers", "window_blocks"});
  ModelConfig model;
  model.name = fields.string("name");
  model.pool = fields.string("pool");
  model.layers = fields.integer("layers");
  model.kv_heads = fields.integer("kv_heads");
  model.num_blocks = fields.integer("num_blocks");
  model.quota_pages = fields.integer("quota_pages");
  model.windowed_layers = fields.integers("windowed_layers");
  model.window_blocks = fields.integer("window_blocks", 0);
  return model;
}

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

Config parse_config(const std::string& text) {
  Value value;
  try {
    value = json::parse(text);
  } catch (const json::ParseError& error) {
    throw ConfigError(error.what());
  }
  const Fields fields(value, "configuration", {"prefix", "ranks", "device", "devices", "ipc", "pools", "models"});
  Config config;
  config.prefix = fields.string("prefix");
  config.ranks = fields.integer("ranks", 1);
  config.device = fields.string("device", "posix");
  config.devices = fields.strings("devices");
  config.ipc = fields.string("ipc", "auto");
  for (const Value& item : fields.array("pools")) {
    const std::string where = "pools[" + std::to_string(config.pools.size()) + "]";
    const Fields pool(item, where, {"name", "page_bytes", "num_pages"});
    config.pools.push_back({pool.string("name"), pool.integer("page_bytes"), pool.integer("num_pages")});
  }
  for (const Value& item : fields.array("models"))
    config.models.push_back(read_model(item, "models[" + std::to_string(config.models.size()) + "]"));
  check_config(config);
  return config;
}

ModelConfig parse_model(const std::string& text) {
  Value value;
  try {
    value = json::parse(text);
  } catch (const json::ParseError& error) {
    throw ConfigError(error.what());
  }
  ModelConfig model = read_model(value, "model");
  check_model(model);
  return model;
}

}  // namespace muxserve::memory
