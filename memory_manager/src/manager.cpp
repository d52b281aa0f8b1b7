#include "manager.hpp"

#include <algorithm>
#include <map>
#include <new>
#include <stdexcept>

#include "text.hpp"

namespace muxserve::memory {
namespace {

void check_key(const std::string& key) {
  const std::string problem = name_problem(key, kMaxKeyBytes);
  if (!problem.empty()) throw Refused(Code::kInvalid, "the hand-off's key " + problem + "; nothing was done");
}

[[noreturn]] void refuse_hand_off(const std::string& who, std::int64_t most) {
  throw Refused(Code::kExhausted, who + " at most " + std::to_string(most) +
                                      " waiting hand-offs; adopt or drop some first. Nothing was done");
}

}  // namespace

Manager::Manager(Config config, Segments& segments, std::uint64_t generation, const Limits& limits,
                 std::uint64_t hash_seed, ChunkMemory* chunks)
    : config_(std::move(config)),
      segments_(segments),
      generation_(generation),
      limits_(limits),
      hash_seed_(hash_seed),
      clients_(kMaxClients) {
  check_config(config_);
  Counters& counters = segments_.counters();
  for (std::size_t i = 0; i < config_.pools.size(); ++i)
    pools_.push_back(
        std::make_unique<PagePool>(config_.pools[i], counters.pools[i], static_cast<std::uint32_t>(i), chunks));
  for (const ModelConfig& model : config_.models) install(model);
  counters.generation.store(generation_, std::memory_order_release);
}

ModelTable& Manager::install(const ModelConfig& model) {
  const auto index = static_cast<std::uint32_t>(models_.size());
  const std::uint32_t pool = pool_index(model.pool);
  models_.emplace_back();
  try {
    std::int32_t* table = segments_.create_table(index, static_cast<std::size_t>(model.table_entries()));
    try {
      models_.back() = std::make_unique<ModelTable>(model, index, pool, *pools_[pool], table,
                                                    segments_.counters().models[index], hash_seed_ + index);
    } catch (...) {
      segments_.destroy_table(index);
      throw;
    }
  } catch (...) {
    models_.pop_back();  // nobody has heard of the index
    throw;
  }
  return *models_.back();
}

std::uint32_t Manager::pool_index(const std::string& name) const {
  for (std::size_t i = 0; i < pools_.size(); ++i)
    if (pools_[i]->config().name == name) return static_cast<std::uint32_t>(i);
  throw Refused(Code::kInvalid, "there is no pool \"" + name + "\"");
}

ModelTable& Manager::get(std::uint32_t index) {
  if (index >= models_.size() || !models_[index])
    throw Refused(Code::kUnknownModel, "there is no model with index " + std::to_string(index));
  return *models_[index];
}

const ModelTable& Manager::model(std::uint32_t index) const { return const_cast<Manager*>(this)->get(index); }

void Manager::show(ModelTable& model) {
  model.show();
  model.pool().show();
}

int Manager::connect(const std::string& name, int pid) {
  const std::string problem = name_problem(name, kMaxNameBytes);
  if (!problem.empty()) throw Refused(Code::kInvalid, "the client's name " + problem);
  for (int slot = 0; slot < kMaxClients; ++slot) {
    auto& client = clients_[static_cast<std::size_t>(slot)];
    if (client) continue;
    client = Client{name, pid};
    return slot;
  }
  throw Refused(Code::kTooManyClients, "all " + std::to_string(kMaxClients) + " client slots are taken");
}

void Manager::disconnect(int client) {
  for (const auto& model : models_) {
    if (!model) continue;
    const bool held = model->held_blocks(client) > 0;
    model->release_client(client);
    if (held) show(*model);
  }
  clients_[static_cast<std::size_t>(client)].reset();
}

// Evicts until `blocks` blocks of the model can be reserved; available_blocks() has said that they can.
void Manager::make_room(ModelTable& model, std::int64_t blocks) {
  while (model.needs_own_eviction(blocks)) model.evict_oldest_block();
  const std::int64_t pages = blocks * model.config().pages_per_block();
  PagePool& pool = model.pool();
  while (pool.free_pages() < pages && model.has_cached()) model.evict_oldest();
  while (pool.free_pages() < pages) {
    ModelTable* victim = nullptr;
    for (const auto& other : models_) {
      if (!other || &other->pool() != &pool || !other->has_cached()) continue;
      if (victim == nullptr || other->oldest_stamp() < victim->oldest_stamp()) victim = other.get();
    }
    victim->evict_oldest();
    victim->show();
  }
}

void Manager::step(int client, const StepRequest& request, StepReply& reply) {
  reply.hit_lengths.clear();
  reply.hits.clear();
  reply.reserved.clear();
  ModelTable& model = get(request.model);
  // Room for every answer, so that nothing fails once something has been done.
  reply.hit_lengths.reserve(request.lookup_lengths.size());
  reply.hits.reserve(request.lookup_hashes.size());
  reply.reserved.reserve(std::min<std::size_t>(request.reserve, static_cast<std::size_t>(model.config().num_blocks)));
  model.publish_and_release(client, request.publish, request.publish_hashes, request.release);
  std::size_t begin = 0;
  for (const std::uint32_t length : request.lookup_lengths) {
    const std::size_t before = reply.hits.size();
    model.look_up(client, Span<Hash>(request.lookup_hashes.data() + begin, length), reply.hits);
    reply.hit_lengths.push_back(static_cast<std::uint32_t>(reply.hits.size() - before));
    begin += length;
  }
  if (request.reserve > 0) {
    const std::int64_t wanted = request.reserve;
    const std::int64_t available = model.available_blocks();
    const std::int64_t count = request.partial ? std::min(wanted, available) : (available >= wanted ? wanted : 0);
    make_room(model, count);
    model.reserve(client, count, reply.reserved);
  }
  show(model);
}

void Manager::hand_off(int client, std::uint32_t model, const std::string& key, Span<std::int32_t> blocks,
                       Span<std::int32_t> release, std::int64_t ttl, std::int64_t now) {
  ModelTable& table = get(model);
  check_key(key);
  if (ttl <= 0 || ttl > kNever / 4) throw Refused(Code::kInvalid, "a hand-off's time to live must be positive");
  if (blocks.empty()) throw Refused(Code::kInvalid, "a hand-off has at least one block; nothing was done");
  check_hand_offs(client, table, blocks.size());
  table.hand_off(client, key, blocks, release, now + ttl);
  show(table);
}

void Manager::leave_window(int client, std::uint32_t model, Span<std::int32_t> blocks) {
  ModelTable& table = get(model);
  table.leave_window(client, blocks);
  show(table);
}

// Whether one more hand-off, of so many blocks, is within the bounds.
void Manager::check_hand_offs(int client, const ModelTable& model, std::size_t blocks) const {
  if (static_cast<std::int64_t>(model.hand_offs().size()) >= limits_.hand_offs_per_model)
    refuse_hand_off("model \"" + model.config().name + "\" may have", limits_.hand_offs_per_model);
  std::int64_t made = 0, all = 0, ids = static_cast<std::int64_t>(blocks);
  for (const auto& each : models_) {
    if (!each) continue;
    made += each->hand_offs().made_by(client);
    all += static_cast<std::int64_t>(each->hand_offs().size());
    ids += each->hand_offs().ids();
  }
  if (made >= limits_.hand_offs_per_client) refuse_hand_off("a client may have", limits_.hand_offs_per_client);
  if (all >= kMaxHandOffs) refuse_hand_off("all models together may have", kMaxHandOffs);
  if (ids > limits_.handed_ids) {
    throw Refused(Code::kExhausted, "the waiting hand-offs of all models would name " + std::to_string(ids) +
                                        " blocks, more than " + std::to_string(limits_.handed_ids) +
                                        "; adopt or drop some first. Nothing was done");
  }
}

std::size_t Manager::handed_blocks(std::uint32_t model, const std::string& key) const {
  check_key(key);
  return this->model(model).handed_blocks(key);
}

std::vector<std::int32_t> Manager::adopt(int client, std::uint32_t model, const std::string& key) {
  check_key(key);
  ModelTable& table = get(model);
  std::vector<std::int32_t> blocks = table.adopt(client, key);
  show(table);
  return blocks;
}

void Manager::drop(std::uint32_t model, const std::string& key) {
  check_key(key);
  ModelTable& table = get(model);
  table.drop(key);
  show(table);
}

void Manager::expire(std::int64_t now) {
  for (const auto& model : models_)
    if (model && model->expire(now)) show(*model);
}

std::int64_t Manager::next_deadline() const {
  std::int64_t next = kNever;
  for (const auto& model : models_)
    if (model) next = std::min(next, model->hand_offs().next_deadline());
  return next;
}

void Manager::set_quotas(Span<std::pair<std::uint32_t, std::int64_t>> quotas) {
  std::map<std::uint32_t, std::int64_t> wanted;
  for (const auto& [index, pages] : quotas) {
    get(index);
    if (pages < 0 || pages > kMaxPages)
      throw Refused(Code::kInvalid, "a quota of " + std::to_string(pages) + " pages is out of range");
    if (!wanted.emplace(index, pages).second)
      throw Refused(Code::kInvalid, "model \"" + get(index).config().name + "\" is given two quotas");
  }
  for (const auto& pool : pools_) {
    std::int64_t sum = 0;
    for (const auto& model : models_) {
      if (!model || &model->pool() != pool.get()) continue;
      const auto found = wanted.find(model->index());
      sum += found != wanted.end() ? found->second : model->config().quota_pages;
    }
    if (sum > pool->config().num_pages) {
      throw Refused(Code::kQuotaExceedsPool, "pool \"" + pool->config().name + "\": the quotas would sum to " +
                                                 std::to_string(sum) + " pages, more than its " +
                                                 std::to_string(pool->config().num_pages) + "; nothing was done");
    }
  }
  for (const auto& [index, pages] : wanted) {
    get(index).set_quota(pages);
    get(index).show();
  }
}

void Manager::set_room(std::uint32_t pool, std::int64_t pages) {
  if (pool >= pools_.size()) throw Refused(Code::kInvalid, "there is no pool with index " + std::to_string(pool));
  PagePool& wanted = *pools_[pool];
  if (pages < 1 || pages > wanted.config().num_pages) {
    throw Refused(Code::kInvalid, "pool \"" + wanted.config().name + "\": room for " + std::to_string(pages) +
                                      " pages is not between 1 and its " + std::to_string(wanted.config().num_pages));
  }
  const std::int64_t chunks = wanted.chunks().chunks_for(pages);
  if (chunks == wanted.chunks().backed()) return;
  std::vector<PageUse> uses(static_cast<std::size_t>(wanted.config().num_pages), PageUse::kNone);
  uses[0] = PageUse::kUsed;
  const auto each_model = [&](auto&& action) {
    for (const auto& model : models_)
      if (model && &model->pool() == &wanted) action(*model);
  };
  each_model([&](ModelTable& model) { model.mark(uses); });
  try {
    if (chunks > wanted.chunks().backed())
      wanted.grow(chunks, uses);
    else
      wanted.shrink(chunks, uses);
  } catch (const std::runtime_error& error) {
    wanted.show();
    throw Refused(Code::kNoMemory, "pool \"" + wanted.config().name + "\": " + error.what());
  }
  each_model([](ModelTable& model) {
    model.leave_chunks();
    model.show();
  });
  wanted.show();
}

void Manager::reset_cache(std::uint32_t model) {
  ModelTable& table = get(model);
  table.reset_cache();
  show(table);
}

std::uint32_t Manager::add_model(const ModelConfig& model) {
  try {
    check_model(model);
  } catch (const ConfigError& error) {
    throw Refused(Code::kInvalid, error.what());
  }
  if (models_.size() >= kMaxModels)
    throw Refused(Code::kExhausted, "this manager has had " + std::to_string(kMaxModels) + " models; restart it");
  const std::uint32_t pool = pool_index(model.pool);
  std::int64_t sum = model.quota_pages, bytes = ModelTable::bytes(model);
  for (const auto& other : models_) {
    if (!other) continue;
    bytes += ModelTable::bytes(other->config());
    if (other->config().name == model.name)
      throw Refused(Code::kInvalid, "there is a model \"" + model.name + "\" already");
    if (other->pool_index() == pool) sum += other->config().quota_pages;
  }
  if (sum > pools_[pool]->config().num_pages) {
    throw Refused(Code::kQuotaExceedsPool, "pool \"" + model.pool + "\": the quotas would sum to " +
                                               std::to_string(sum) + " pages, more than its " +
                                               std::to_string(pools_[pool]->config().num_pages));
  }
  try {
    check_table(model, pools_[pool]->config());
  } catch (const ConfigError& error) {
    throw Refused(Code::kInvalid, error.what());
  }
  if (bytes > limits_.table_bytes) {
    throw Refused(Code::kExhausted, "model \"" + model.name +
                                        "\": the page tables and books of all models would take " +
                                        std::to_string(bytes >> 20) + " MiB, more than the " +
                                        std::to_string(limits_.table_bytes >> 20) + " MiB of --max-tables-mib");
  }
  try {
    return install(model).index();
  } catch (const std::runtime_error& error) {
    throw Refused(Code::kNoMemory, "model \"" + model.name + "\" was not added: " + error.what());
  }
}

void Manager::remove_model(std::uint32_t model) {
  ModelTable& table = get(model);
  if (table.used_pages() > 0) {
    throw Refused(Code::kModelInUse, "model \"" + table.config().name + "\" still has " +
                                         std::to_string(table.used_pages()) + " pages owned or handed off");
  }
  table.reset_cache();
  table.set_quota(0);
  show(table);
  models_[model].reset();
  segments_.destroy_table(model);
}

void Manager::check() const {
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const PagePool& pool = *pools_[i];
    const PageChunks& chunks = pool.chunks();
    const std::string where = "pool \"" + pool.config().name + "\": ";
    std::vector<std::uint8_t> seen(static_cast<std::size_t>(pool.config().num_pages), 0);
    seen[0] = 1;
    std::int64_t sum = 1 + pool.free_pages(), cached = 0, quotas = 0;
    for (std::int64_t at = 0; at < pool.free_pages(); ++at) {
      const std::int32_t page = pool.stack()[at];
      if (page <= 0 || page >= pool.config().num_pages || seen[static_cast<std::size_t>(page)]++)
        throw std::logic_error(where + "page " + std::to_string(page) + " is on the free list wrongly");
      if (chunks.is_vacated(page))
        throw std::logic_error(where + "page " + std::to_string(page) + " of a vacated chunk is on the free list");
    }
    std::vector<PageUse> uses(seen.size(), PageUse::kNone);
    for (const auto& model : models_) {
      if (!model || model->pool_index() != i) continue;
      model->check(seen);
      model->mark(uses);
      sum += model->used_pages() + model->cached_pages();
      cached += model->cached_pages();
      quotas += model->config().quota_pages;
    }
    sum += check_chunks(pool, uses);
    if (quotas > pool.config().num_pages) throw std::logic_error(where + "the quotas sum to more than the pool");
    if (sum != pool.config().num_pages) throw std::logic_error(where + "free and used pages do not sum to the pool");
    if (cached != pool.cached_pages()) throw std::logic_error(where + "cached pages do not agree");
  }
}

// Pages of the pool that nobody uses and nobody gets, since their chunks are vacated or vacant.
std::int64_t Manager::check_chunks(const PagePool& pool, const std::vector<PageUse>& uses) {
  const PageChunks& chunks = pool.chunks();
  std::int64_t away = 0, room = 0, backed = 0;
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const auto begin = uses.begin() + static_cast<std::ptrdiff_t>(chunks.first_page(chunk));
    const auto end = begin + static_cast<std::ptrdiff_t>(chunks.pages_of(chunk));
    const std::int64_t used = std::count(begin, end, PageUse::kUsed);
    const PageChunks::State state = chunks.state(chunk);
    if (state == PageChunks::State::kBacked) {
      room += chunks.pages_of(chunk);
    } else {
      away += chunks.pages_of(chunk) - used;
      if (std::count(begin, end, PageUse::kCached) != 0) throw std::logic_error("a page of a vacated chunk is cached");
      if (state == PageChunks::State::kVacant && used != 0) throw std::logic_error("a page in use has no memory");
      if (state == PageChunks::State::kVacated && (used == 0 || used != chunks.left(chunk)))
        throw std::logic_error("the pages in use of a vacated chunk do not agree");
    }
    if (state != PageChunks::State::kVacant) backed += chunks.pages_of(chunk);
  }
  if (room != chunks.room_pages() || backed != chunks.backed_pages())
    throw std::logic_error("the pages of the chunks do not sum to the pool");
  return away;
}

}  // namespace muxserve::memory
