// The core of the memory manager: pools, models and clients. No input or output, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config.hpp"
#include "errors.hpp"
#include "model_table.hpp"
#include "page_pool.hpp"
#include "pool_memory.hpp"
#include "segments.hpp"
#include "span.hpp"

namespace muxserve::memory {

// One engine step: see Manager::step. `lookup_lengths` splits `lookup_hashes` into one list per lookup.
struct StepRequest {
  std::uint32_t model = 0;
  Span<std::int32_t> release;
  Span<std::int32_t> publish;
  Span<Hash> publish_hashes;
  Span<std::uint32_t> lookup_lengths;
  Span<Hash> lookup_hashes;
  std::uint32_t reserve = 0;
  bool partial = false;
};

// Kept by the caller from step to step, so that a step allocates nothing. `hit_lengths` splits `hits`.
struct StepReply {
  std::vector<std::uint32_t> hit_lengths;
  std::vector<std::int32_t> hits;
  std::vector<std::int32_t> reserved;
};

// Every operation either does all that it says or throws Refused or std::bad_alloc and changes nothing. `client` is
// what connect() returned. Times are nanoseconds of one monotonic clock.
class Manager {
 public:
  // Throws ConfigError, and what Segments throws. `segments` must outlive the manager. `hash_seed` is what clients must
  // not know, lest they choose hashes that collide in the prefix indices. `chunks` (null: nothing is given back) must
  // outlive the manager, too.
  Manager(Config config, Segments& segments, std::uint64_t generation, const Limits& limits = {},
          std::uint64_t hash_seed = 0, ChunkMemory* chunks = nullptr);

  std::uint64_t generation() const { return generation_; }
  const Config& config() const { return config_; }

  // A slot for one more client. Throws Refused(kTooManyClients).
  int connect(const std::string& name, int pid);

  // Ends every hold of the client.
  void disconnect(int client);

  // Publishes, releases, looks prefixes up, reserves: in this order. Without `partial` either all `reserve` blocks are
  // given or none; with it as many as quota, pool and page table allow.
  void step(int client, const StepRequest& request, StepReply& reply);

  // Hands `blocks`, at least one, over under `key` for `ttl` nanoseconds from `now`, and ends the client's hold on
  // `release`.
  void hand_off(int client, std::uint32_t model, const std::string& key, Span<std::int32_t> blocks,
                Span<std::int32_t> release, std::int64_t ttl, std::int64_t now);

  // Gives up the pages of windowed layers in blocks that are behind the window; see ModelTable::leave_window.
  void leave_window(int client, std::uint32_t model, Span<std::int32_t> blocks);

  // How many blocks a hand-off has.
  std::size_t handed_blocks(std::uint32_t model, const std::string& key) const;

  // The blocks of a hand-off, now held by the client.
  std::vector<std::int32_t> adopt(int client, std::uint32_t model, const std::string& key);

  // Gives a hand-off up.
  void drop(std::uint32_t model, const std::string& key);

  // Gives up hand-offs whose time is over.
  void expire(std::int64_t now);

  // When expire() has something to do next; kNever if nothing waits.
  std::int64_t next_deadline() const;

  // Sets the quotas (pages) of several models at once.
  void set_quotas(Span<std::pair<std::uint32_t, std::int64_t>> quotas);

  // Has `pages` pages of a pool in use at most, rounded up to whole chunks: more come with memory of their own; where
  // there were more, chunks are vacated, and their memory goes when nobody uses a page of them. What is cached there is
  // evicted. Throws Refused(kNoMemory) where memory is missing; the pool is as much larger as there was memory then.
  void set_room(std::uint32_t pool, std::int64_t pages);

  // Forgets every published block of the model.
  void reset_cache(std::uint32_t model);

  // Adds a model; its index is never used for another one.
  std::uint32_t add_model(const ModelConfig& model);

  // Removes a model without owned or handed-off blocks.
  void remove_model(std::uint32_t model);

  // Pools and models as one JSON object; `pool_handles` says by pool and rank where its memory is mapped
  // from.
  std::string describe(const PoolHandles& pool_handles) const;

  // Everything countable as one JSON object.
  std::string statistics() const;

  // The page table of a model: num_blocks * layers * kv_heads entries. Throws Refused(kUnknownModel).
  const ModelTable& model(std::uint32_t index) const;

  // Throws std::logic_error unless in every pool free + owned + handed + cached pages, those that vacated chunks have
  // beside, and the null page are the pool, no page is in use twice, and all in use have memory. For tests; takes time
  // in the size of the pools.
  void check() const;

 private:
  struct Client {
    std::string name;
    int pid = 0;
  };

  ModelTable& get(std::uint32_t index);
  void make_room(ModelTable& model, std::int64_t blocks);
  ModelTable& install(const ModelConfig& model);
  void check_hand_offs(int client, const ModelTable& model, std::size_t blocks) const;
  std::uint32_t pool_index(const std::string& name) const;
  void show(ModelTable& model);
  static std::int64_t check_chunks(const PagePool& pool, const std::vector<PageUse>& uses);

  Config config_;
  Segments& segments_;
  std::uint64_t generation_;
  Limits limits_;
  std::uint64_t hash_seed_;
  std::vector<std::unique_ptr<PagePool>> pools_;
  std::vector<std::unique_ptr<ModelTable>> models_;  // by index; null where removed
  std::vector<std::optional<Client>> clients_;
};

}  // namespace muxserve::memory
