// The manager's configuration: its pools and models, and what is refused. protocol.hpp has how it is encoded.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "limits.hpp"

namespace muxserve::memory {

// The configuration is wrong; what() names the place and what to do.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One page pool of num_pages pages of page_bytes bytes. Page 0 is the null page. Its memory comes and goes in chunks of
// as many pages as end with a multiple of chunk_bytes (0: it stays as a whole); at first start_pages have memory, in
// whole chunks (0: all).
struct PoolConfig {
  std::string name;
  std::int64_t page_bytes = 0;
  std::int64_t num_pages = 0;
  std::int64_t chunk_bytes = 0;
  std::int64_t start_pages = 0;

  std::int64_t pages_of_a_chunk() const;
};

// One model. A block takes layers * kv_heads pages of `pool`; block 0 is the null block. quota_pages bounds the pages
// that the model may own or have handed off. The `windowed_layers`, ascending, see a window of at most `window_blocks`
// full blocks before the block that a token is in.
struct ModelConfig {
  std::string name;
  std::string pool;
  std::int64_t layers = 0;
  std::int64_t kv_heads = 0;
  std::int64_t num_blocks = 0;
  std::int64_t quota_pages = 0;
  std::vector<std::int64_t> windowed_layers = {};
  std::int64_t window_blocks = 0;

  std::int32_t pages_per_block() const { return static_cast<std::int32_t>(layers * kv_heads); }
  // Those of a block that its windowed layers have.
  std::int32_t window_pages() const {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(windowed_layers.size()) * kv_heads);
  }
  // Of the page table. Fits for a checked model.
  std::int64_t table_entries() const { return num_blocks * layers * kv_heads; }
};

// `prefix` starts the name of every shared memory segment, so that the names outlive a restart. Every pool has its
// memory once on each of `ranks` tensor-parallel ranks; a page has the same number on all of them, so there is one set
// of books.
struct Config {
  std::string prefix;
  std::int64_t ranks = 1;
  std::string device = "posix";      // or "cuda": what pools lie in
  std::vector<std::string> devices;  // with "cuda": UUIDs of the GPUs, by rank
  std::string ipc = "auto";          // with "cuda": "auto", "vmm" or "legacy", how pools are exported
  std::vector<PoolConfig> pools;
  std::vector<ModelConfig> models;
};

// Checks every value, that pools and models have names of their own, and that a pool has the pages of its quotas.
// Throws ConfigError.
void check_config(const Config& config);

// Checks the ranges of one model alone, not whether its pool exists and has the pages. Throws ConfigError.
void check_model(const ModelConfig& model);

// Checks that the page table of a checked model is not larger than the pages of its pool can ever need. Throws
// ConfigError.
void check_table(const ModelConfig& model, const PoolConfig& pool);

}  // namespace muxserve::memory
