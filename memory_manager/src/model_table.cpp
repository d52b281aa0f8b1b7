#include "model_table.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "errors.hpp"

namespace muxserve::memory {
namespace {

std::uint64_t bit(int client) { return std::uint64_t{1} << client; }

}  // namespace

ModelTable::ModelTable(ModelConfig config, std::uint32_t index, std::uint32_t pool_index, PagePool& pool,
                       std::int32_t* table, ModelCounters& counters, std::uint64_t seed)
    : config_(std::move(config)),
      index_(index),
      pool_index_(pool_index),
      pool_(pool),
      table_(table),
      counters_(counters),
      pages_per_block_(config_.pages_per_block()),
      blocks_(static_cast<std::size_t>(config_.num_blocks)),
      prefixes_(static_cast<std::int32_t>(config_.num_blocks), seed) {
  free_ids_.reserve(blocks_.size());
  for (auto id = static_cast<std::int32_t>(config_.num_blocks - 1); id > 0; --id) free_ids_.push_back(id);
  show();
}

void ModelTable::refuse(int client, std::int32_t id) const {
  std::string words = "model \"" + config_.name + "\": block " + std::to_string(id);
  if (!known(id))
    words += " does not exist (blocks are 1 to " + std::to_string(config_.num_blocks - 1) + ")";
  else if ((blocks_[static_cast<std::size_t>(id)].holders & bit(client)) == 0)
    words += " is not held by this client";
  else
    words += " is given twice";
  throw Refused(Code::kNotOwner, words + "; nothing was done");
}

void ModelTable::clear_holds(int client, Span<std::int32_t> ids) {
  const std::uint64_t mask = bit(client);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int32_t id = ids[i];
    if (!known(id) || (block(id).holders & mask) == 0) {
      // First, so that refuse() can tell "twice" from "never".
      for (const std::int32_t restored : ids.first(i)) block(restored).holders |= mask;
      refuse(client, id);
    }
    block(id).holders &= ~mask;
  }
  held_[static_cast<std::size_t>(client)] -= static_cast<std::int64_t>(ids.size());
}

// Undoes clear_holds().
void ModelTable::restore_holds(int client, Span<std::int32_t> ids) {
  for (const std::int32_t id : ids) block(id).holders |= bit(client);
  held_[static_cast<std::size_t>(client)] += static_cast<std::int64_t>(ids.size());
}

void ModelTable::hold(int client, std::int32_t id) {
  Block& entry = block(id);
  if ((entry.holders & bit(client)) != 0) return;
  if (entry.holders == 0) ++owned_blocks_;
  entry.holders |= bit(client);
  ++held_[static_cast<std::size_t>(client)];
}

// A cached block comes back into use.
void ModelTable::use(std::int32_t id) {
  unlink_cached(id);
  ++used_blocks_;
}

// A holder of the block has gone.
void ModelTable::unheld(std::int32_t id) {
  if (block(id).holders != 0) return;
  --owned_blocks_;
  if (block(id).hand_offs == 0) retire(id);
}

// The block has lost its last holder and its last hand-off.
void ModelTable::retire(std::int32_t id) {
  --used_blocks_;
  if (prefixes_.contains(id))
    push_cached(id);
  else
    free_block(id);
}

void ModelTable::push_cached(std::int32_t id) {
  Block& entry = block(id);
  entry.stamp = pool_.next_stamp();
  entry.previous = newest_;
  entry.next = kNone;
  (newest_ == kNone ? oldest_ : block(newest_).next) = id;
  newest_ = id;
  ++cached_blocks_;
  pool_.add_cached(pages_per_block_);
}

void ModelTable::unlink_cached(std::int32_t id) {
  Block& entry = block(id);
  (entry.previous == kNone ? oldest_ : block(entry.previous).next) = entry.next;
  (entry.next == kNone ? newest_ : block(entry.next).previous) = entry.previous;
  --cached_blocks_;
  pool_.add_cached(-pages_per_block_);
}

void ModelTable::free_block(std::int32_t id) {
  pool_.give(row(id), pages_per_block_);
  free_ids_.push_back(id);
}

void ModelTable::publish_and_release(int client, Span<std::int32_t> publish, Span<Hash> hashes,
                                     Span<std::int32_t> release) {
  for (const std::int32_t id : publish)
    if (!known(id) || (block(id).holders & bit(client)) == 0) refuse(client, id);
  clear_holds(client, release);
  // From here on nothing fails.
  for (std::size_t i = 0; i < publish.size(); ++i) prefixes_.insert(publish[i], hashes[i]);
  for (const std::int32_t id : release) unheld(id);
}

void ModelTable::look_up(int client, Span<Hash> hashes, std::vector<std::int32_t>& out) {
  lookups_ += static_cast<std::int64_t>(hashes.size());
  for (const Hash& hash : hashes) {
    const std::int32_t id = prefixes_.find(hash);
    if (id < 0) return;
    const Block& entry = block(id);
    if (entry.holders == 0 && entry.hand_offs == 0) {
      if (used_pages() + pages_per_block_ > config_.quota_pages) return;
      use(id);
    }
    hold(client, id);
    out.push_back(id);
    ++hits_;
  }
}

std::int64_t ModelTable::available_blocks() const {
  const std::int64_t pages = std::min(config_.quota_pages - used_pages(), pool_.free_pages() + pool_.cached_pages());
  return std::clamp<std::int64_t>(pages / pages_per_block_, 0, config_.num_blocks - 1 - used_blocks_);
}

void ModelTable::reserve(int client, std::int64_t count, std::vector<std::int32_t>& out) {
  const std::uint64_t mask = bit(client);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t id = free_ids_.back();
    free_ids_.pop_back();
    pool_.take(row(id), pages_per_block_);
    block(id).holders = mask;
    out.push_back(id);
  }
  used_blocks_ += count;
  owned_blocks_ += count;
  held_[static_cast<std::size_t>(client)] += count;
}

void ModelTable::hand_off(int client, const std::string& key, Span<std::int32_t> blocks, Span<std::int32_t> release,
                          std::int64_t deadline) {
  if (hand_offs_.find(key) != nullptr)
    throw Refused(Code::kKeyExists, "model \"" + config_.name + "\": a hand-off \"" + key + "\" is waiting already");
  clear_holds(client, blocks);  // finds what is not held and what is given twice
  restore_holds(client, blocks);
  clear_holds(client, release);
  try {
    hand_offs_.add(key, std::vector<std::int32_t>(blocks.begin(), blocks.end()), deadline, client);
  } catch (...) {
    restore_holds(client, release);
    throw;
  }
  // From here on nothing fails.
  for (const std::int32_t id : blocks) ++block(id).hand_offs;
  for (const std::int32_t id : release) unheld(id);
}

void ModelTable::refuse_key(const std::string& key) const {
  throw Refused(Code::kUnknownKey, "model \"" + config_.name + "\": no hand-off \"" + key + "\" is waiting");
}

std::size_t ModelTable::handed_blocks(const std::string& key) const {
  const std::vector<std::int32_t>* blocks = hand_offs_.find(key);
  if (blocks == nullptr) refuse_key(key);
  return blocks->size();
}

std::vector<std::int32_t> ModelTable::adopt(int client, const std::string& key) {
  auto ids = hand_offs_.take(key);
  if (!ids) refuse_key(key);
  for (const std::int32_t id : *ids) {
    --block(id).hand_offs;
    hold(client, id);
  }
  return std::move(*ids);
}

void ModelTable::drop_blocks(const std::vector<std::int32_t>& ids) {
  // Backwards: the end of a sequence is worth less to the prefix cache than its beginning.
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    if (--block(*id).hand_offs == 0 && block(*id).holders == 0) retire(*id);
  }
}

void ModelTable::drop(const std::string& key) {
  const auto ids = hand_offs_.take(key);
  if (!ids) refuse_key(key);
  drop_blocks(*ids);
}

bool ModelTable::expire(std::int64_t now) {
  bool any = false;
  while (const auto ids = hand_offs_.take_expired(now)) {
    drop_blocks(*ids);
    ++expired_;
    any = true;
  }
  return any;
}

void ModelTable::release_client(int client) {
  hand_offs_.forget_maker(client);
  if (held_blocks(client) == 0) return;
  const std::uint64_t mask = bit(client);
  for (auto id = static_cast<std::int32_t>(config_.num_blocks - 1); id > 0; --id) {
    if ((block(id).holders & mask) == 0) continue;
    block(id).holders &= ~mask;
    unheld(id);
  }
  held_[static_cast<std::size_t>(client)] = 0;
}

void ModelTable::evict_oldest() {
  const std::int32_t id = oldest_;
  unlink_cached(id);
  prefixes_.erase(id);
  free_block(id);
  ++evictions_;
}

void ModelTable::reset_cache() {
  while (has_cached()) {
    evict_oldest();
    --evictions_;  // asked for, not forced by a lack of pages
  }
  for (std::int32_t id = 1; id < config_.num_blocks; ++id)
    if (prefixes_.contains(id)) prefixes_.erase(id);
}

std::int64_t ModelTable::bytes(const ModelConfig& config) {
  // By block: its entry, its place on the free list, and up to four slots in the prefix index beside its hash.
  constexpr std::int64_t kByBlock = sizeof(Block) + 5 * sizeof(std::int32_t) + sizeof(Hash) + 1;
  return config.table_entries() * static_cast<std::int64_t>(sizeof(std::int32_t)) + config.num_blocks * kByBlock;
}

ModelStatistics ModelTable::statistics() const {
  ModelStatistics result;
  result.owned_pages = owned_blocks_ * pages_per_block_;
  result.handed_pages = (used_blocks_ - owned_blocks_) * pages_per_block_;
  result.cached_pages = cached_pages();
  result.evictions = evictions_;
  result.lookups = lookups_;
  result.hits = hits_;
  result.expired = expired_;
  result.published = prefixes_.size();
  result.hand_offs = static_cast<std::int64_t>(hand_offs_.size());
  return result;
}

void ModelTable::show() {
  store(counters_.used_pages, used_pages());
  store(counters_.cached_pages, cached_pages());
  store(counters_.quota_pages, config_.quota_pages);
}

void ModelTable::check(std::vector<std::uint8_t>& seen) const {
  const auto fail = [this](const std::string& what) {
    throw std::logic_error("model \"" + config_.name + "\": " + what);
  };
  std::vector<std::uint8_t> is_free(blocks_.size(), 0);
  for (const std::int32_t id : free_ids_) {
    if (!known(id) || is_free[static_cast<std::size_t>(id)]) fail("block ids on the free list are wrong");
    is_free[static_cast<std::size_t>(id)] = 1;
  }
  hand_offs_.check();
  std::vector<std::int32_t> handed(blocks_.size(), 0);
  hand_offs_.each([&](const std::vector<std::int32_t>& ids) {
    for (const std::int32_t id : ids) ++handed[static_cast<std::size_t>(id)];
  });
  std::int64_t used = 0, owned = 0, cached = 0;
  std::array<std::int64_t, kMaxClients> held{};
  for (std::int32_t id = 1; id < config_.num_blocks; ++id) {
    const Block& entry = blocks_[static_cast<std::size_t>(id)];
    if (entry.hand_offs != handed[static_cast<std::size_t>(id)]) fail("hand-offs of a block do not agree");
    const bool in_use = entry.holders != 0 || entry.hand_offs != 0;
    const bool published = prefixes_.contains(id);
    if (is_free[static_cast<std::size_t>(id)]) {
      if (in_use || published) fail("a free block is in use or published");
      continue;
    }
    if (!in_use && !published) fail("a block is neither free, nor in use, nor cached");
    in_use ? ++used : ++cached;
    if (entry.holders != 0) ++owned;
    for (int client = 0; client < kMaxClients; ++client)
      if (entry.holders & bit(client)) ++held[static_cast<std::size_t>(client)];
    const std::int32_t* pages = table_ + static_cast<std::size_t>(id) * static_cast<std::size_t>(pages_per_block_);
    for (std::int32_t i = 0; i < pages_per_block_; ++i) {
      const std::int32_t page = pages[i];
      if (page <= 0 || page >= pool_.config().num_pages) fail("a page-table entry is no page of the pool");
      if (seen[static_cast<std::size_t>(page)]++) fail("page " + std::to_string(page) + " is in use twice");
    }
  }
  std::int64_t listed = 0;
  std::uint64_t stamp = 0;
  for (std::int32_t id = oldest_; id != kNone; id = blocks_[static_cast<std::size_t>(id)].next) {
    if (blocks_[static_cast<std::size_t>(id)].stamp <= stamp) fail("the cached blocks are not in order of age");
    stamp = blocks_[static_cast<std::size_t>(id)].stamp;
    ++listed;
  }
  if (used != used_blocks_ || owned != owned_blocks_ || cached != cached_blocks_ || listed != cached_blocks_)
    fail("block counts do not agree");
  if (held != held_) fail("holds of clients do not agree");
}

}  // namespace muxserve::memory
