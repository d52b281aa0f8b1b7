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
      window_pages_(config_.window_pages()),
      windowed_(static_cast<std::size_t>(config_.layers), 0),
      blocks_(static_cast<std::size_t>(config_.num_blocks)),
      asides_(window_pages_ > 0 ? blocks_.size() : 0),
      prefixes_(static_cast<std::int32_t>(config_.num_blocks), seed) {
  for (const std::int64_t layer : config_.windowed_layers) windowed_[static_cast<std::size_t>(layer)] = 1;
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
  if (entry.holders == 0) {
    ++owned_blocks_;
    owned_pages_ += pages_of(entry);
  }
  entry.holders |= bit(client);
  ++held_[static_cast<std::size_t>(client)];
}

// A cached block comes back into use.
void ModelTable::use(std::int32_t id) {
  unlink_cached(id);
  ++used_blocks_;
  used_pages_ += pages_of(block(id));
}

// A holder of the block has gone.
void ModelTable::unheld(std::int32_t id) {
  if (block(id).holders != 0) return;
  --owned_blocks_;
  owned_pages_ -= pages_of(block(id));
  if (block(id).hand_offs == 0) retire(id);
}

// The block has lost its last holder and its last hand-off.
void ModelTable::retire(std::int32_t id) {
  --used_blocks_;
  used_pages_ -= pages_of(block(id));
  if (prefixes_.contains(id)) {
    push_cached(id);
    if (pool_.vacates(row(id), pages_per_block_)) evict(id);
  } else {
    free_block(id);
  }
}

// The block can be found by its hash no more.
void ModelTable::withdraw(std::int32_t id) {
  prefixes_.erase(id);
  if (block(id).window == Window::kAside) free_aside(id);
  // One that is not cached is in use, or about to be given back.
  if (oldest_ != id && block(id).previous == kNone) return;
  unlink_cached(id);
  free_block(id);
}

void ModelTable::push_aside(std::int32_t id) {
  block(id).window = Window::kAside;
  Aside& entry = asides_[static_cast<std::size_t>(id)];
  entry = {pool_.next_stamp(), newest_aside_, kNone};
  (newest_aside_ == kNone ? oldest_aside_ : asides_[static_cast<std::size_t>(newest_aside_)].next) = id;
  newest_aside_ = id;
  cached_pages_ += window_pages_;
  pool_.add_cached(window_pages_);
}

void ModelTable::unlink_aside(std::int32_t id) {
  const Aside entry = asides_[static_cast<std::size_t>(id)];
  (entry.previous == kNone ? oldest_aside_ : asides_[static_cast<std::size_t>(entry.previous)].next) = entry.next;
  (entry.next == kNone ? newest_aside_ : asides_[static_cast<std::size_t>(entry.next)].previous) = entry.previous;
  cached_pages_ -= window_pages_;
  pool_.add_cached(-window_pages_);
}

// Puts the pages of the block's windowed layers back into the pool.
void ModelTable::free_window(std::int32_t id) {
  const auto heads = static_cast<std::int32_t>(config_.kv_heads);
  for (const std::int64_t layer : config_.windowed_layers) {
    std::int32_t* pages = row(id) + layer * heads;
    pool_.give(pages, heads);
    std::fill(pages, pages + heads, 0);
  }
  block(id).window = Window::kGone;
}

void ModelTable::free_aside(std::int32_t id) {
  unlink_aside(id);
  free_window(id);
}

void ModelTable::push_cached(std::int32_t id) {
  Block& entry = block(id);
  entry.stamp = pool_.next_stamp();
  entry.previous = newest_;
  entry.next = kNone;
  (newest_ == kNone ? oldest_ : block(newest_).next) = id;
  newest_ = id;
  ++cached_blocks_;
  cached_pages_ += pages_of(entry);
  pool_.add_cached(pages_of(entry));
}

void ModelTable::unlink_cached(std::int32_t id) {
  Block& entry = block(id);
  (entry.previous == kNone ? oldest_ : block(entry.previous).next) = entry.next;
  (entry.next == kNone ? newest_ : block(entry.next).previous) = entry.previous;
  entry.previous = kNone;
  --cached_blocks_;
  cached_pages_ -= pages_of(entry);
  pool_.add_cached(-pages_of(entry));
}

void ModelTable::free_block(std::int32_t id) {
  Block& entry = block(id);
  if (entry.window == Window::kAside) free_aside(id);
  if (entry.window == Window::kPresent) {
    pool_.give(row(id), pages_per_block_);
  } else {
    const auto heads = static_cast<std::int32_t>(config_.kv_heads);
    for (std::size_t layer = 0; layer < windowed_.size(); ++layer)
      if (windowed_[layer] == 0) pool_.give(row(id) + static_cast<std::ptrdiff_t>(layer) * heads, heads);
    entry.window = Window::kPresent;
  }
  free_ids_.push_back(id);
}

void ModelTable::publish_and_release(int client, Span<std::int32_t> publish, Span<Hash> hashes,
                                     Span<std::int32_t> release) {
  for (const std::int32_t id : publish)
    if (!known(id) || (block(id).holders & bit(client)) == 0) refuse(client, id);
  clear_holds(client, release);
  // From here on nothing fails.
  for (std::size_t i = 0; i < publish.size(); ++i) {
    if (window_pages_ > 0 && block(publish[i]).window != Window::kGone && !prefixes_.contains(publish[i])) {
      // A block that has all of its pages is worth more than one that has not.
      const std::int32_t known = prefixes_.find(hashes[i]);
      if (known > 0 && block(known).window == Window::kGone) withdraw(known);
    }
    prefixes_.insert(publish[i], hashes[i]);
  }
  for (const std::int32_t id : release) unheld(id);
}

ModelTable::Window ModelTable::window_of(const Hash& hash) const {
  return blocks_[static_cast<std::size_t>(prefixes_.find(hash))].window;
}

// How many blocks look_up() can take with windowed layers.
std::size_t ModelTable::longest_prefix(Span<Hash> hashes) const {
  const auto reach = static_cast<std::size_t>(config_.window_blocks);
  std::size_t best = 0, whole = 0;  // `whole`: blocks before this place without a gap that have all of their pages
  std::int64_t pages = used_pages_, aside = 0;  // if all were taken so far: beside, and of windows
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const std::int32_t id = prefixes_.find(hashes[i]);
    if (id < 0) break;
    const Block& entry = blocks_[static_cast<std::size_t>(id)];
    if (entry.holders == 0 && entry.hand_offs == 0) pages += pages_of(entry);
    if (pages > config_.quota_pages) break;
    whole = entry.window == Window::kGone ? 0 : whole + 1;
    if (entry.window == Window::kAside) aside += window_pages_;
    if (i >= reach && window_of(hashes[i - reach]) == Window::kAside) aside -= window_pages_;
    if (whole >= std::min(reach, i + 1) && pages + aside <= config_.quota_pages) best = i + 1;
  }
  return best;
}

void ModelTable::look_up(int client, Span<Hash> hashes, std::vector<std::int32_t>& out) {
  lookups_ += static_cast<std::int64_t>(hashes.size());
  if (window_pages_ > 0) {
    const auto reach = static_cast<std::size_t>(config_.window_blocks);
    const std::size_t found = longest_prefix(hashes);
    for (std::size_t i = 0; i < found; ++i) {
      const std::int32_t id = prefixes_.find(hashes[i]);
      Block& entry = block(id);
      if (entry.holders == 0 && entry.hand_offs == 0) use(id);
      hold(client, id);
      if (i + reach >= found && entry.window == Window::kAside) {
        unlink_aside(id);
        entry.window = Window::kPresent;
        used_pages_ += window_pages_;
        owned_pages_ += window_pages_;
      }
      out.push_back(id);
      ++hits_;
    }
    return;
  }
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

void ModelTable::leave_window(int client, Span<std::int32_t> blocks) {
  if (window_pages_ == 0)
    throw Refused(Code::kInvalid, "model \"" + config_.name + "\" has no layers with a window; nothing was done");
  const std::uint64_t mask = bit(client);
  for (const std::int32_t id : blocks)
    if (!known(id) || (block(id).holders & mask) == 0) refuse(client, id);
  for (const std::int32_t id : blocks) {
    const Block& entry = block(id);
    // Others may be at an earlier place of the sequence.
    if (entry.holders != mask || entry.hand_offs != 0 || entry.window != Window::kPresent) continue;
    used_pages_ -= window_pages_;
    owned_pages_ -= window_pages_;
    const bool kept = prefixes_.contains(id) && !pool_.vacates(row(id), pages_per_block_);
    kept ? push_aside(id) : free_window(id);
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
  used_pages_ += count * pages_per_block_;
  owned_pages_ += count * pages_per_block_;
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

std::uint64_t ModelTable::oldest_stamp() const {
  const std::uint64_t whole = oldest_ == kNone ? ~std::uint64_t{0} : blocks_[static_cast<std::size_t>(oldest_)].stamp;
  if (oldest_aside_ == kNone) return whole;
  return std::min(whole, asides_[static_cast<std::size_t>(oldest_aside_)].stamp);
}

void ModelTable::evict_oldest() {
  if (oldest_ != kNone && blocks_[static_cast<std::size_t>(oldest_)].stamp == oldest_stamp())
    evict_oldest_block();
  else
    free_aside(oldest_aside_);
}

void ModelTable::evict(std::int32_t id) {
  unlink_cached(id);
  prefixes_.erase(id);
  free_block(id);
  ++evictions_;
}

void ModelTable::mark(std::vector<PageUse>& uses) const {
  const auto heads = static_cast<std::int32_t>(config_.kv_heads);
  for (std::int32_t id = 1; id < config_.num_blocks; ++id) {
    const Block& entry = blocks_[static_cast<std::size_t>(id)];
    const bool in_use = entry.holders != 0 || entry.hand_offs != 0;
    if (!in_use && !prefixes_.contains(id)) continue;
    const std::int32_t* pages = table_ + static_cast<std::size_t>(id) * static_cast<std::size_t>(pages_per_block_);
    for (std::int32_t i = 0; i < pages_per_block_; ++i) {
      const bool aside = entry.window == Window::kAside && windowed_[static_cast<std::size_t>(i / heads)] != 0;
      if (pages[i] == 0) continue;
      uses[static_cast<std::size_t>(pages[i])] = in_use && !aside ? PageUse::kUsed : PageUse::kCached;
    }
  }
}

void ModelTable::leave_chunks() {
  const auto vacates = [this](std::int32_t id) { return pool_.vacates(row(id), pages_per_block_); };
  for (std::int32_t id = oldest_aside_, next = kNone; id != kNone; id = next) {
    next = asides_[static_cast<std::size_t>(id)].next;
    if (vacates(id)) free_aside(id);
  }
  for (std::int32_t id = oldest_, next = kNone; id != kNone; id = next) {
    next = block(id).next;
    if (vacates(id)) evict(id);
  }
}

void ModelTable::reset_cache() {
  while (oldest_ != kNone) {
    evict_oldest_block();
    --evictions_;  // asked for, not forced by a lack of pages
  }
  while (oldest_aside_ != kNone) free_aside(oldest_aside_);
  for (std::int32_t id = 1; id < config_.num_blocks; ++id)
    if (prefixes_.contains(id)) prefixes_.erase(id);
}

std::int64_t ModelTable::bytes(const ModelConfig& config) {
  // By block: its entry, its place on the free list, and up to four slots in the prefix index beside its hash.
  constexpr std::int64_t kByBlock = sizeof(Block) + 5 * sizeof(std::int32_t) + sizeof(Hash) + 1;
  const std::int64_t by_block = kByBlock + (config.window_pages() > 0 ? sizeof(Aside) : 0);
  return config.table_entries() * static_cast<std::int64_t>(sizeof(std::int32_t)) + config.num_blocks * by_block;
}

std::int64_t ModelTable::held_pages(int client) const {
  if (window_pages_ == 0 || held_blocks(client) == 0) return held_blocks(client) * pages_per_block_;
  std::int64_t pages = 0;
  for (const Block& entry : blocks_)
    if ((entry.holders & bit(client)) != 0) pages += pages_of(entry);
  return pages;
}

ModelStatistics ModelTable::statistics() const {
  ModelStatistics result;
  result.owned_pages = owned_pages_;
  result.handed_pages = used_pages_ - owned_pages_;
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
  std::int64_t used = 0, owned = 0, cached = 0, aside = 0;
  std::int64_t used_pages = 0, owned_pages = 0, cached_pages = 0;
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
    (in_use ? used_pages : cached_pages) += pages_of(entry);
    if (entry.holders != 0) {
      ++owned;
      owned_pages += pages_of(entry);
    }
    if (entry.window == Window::kAside) {
      if (!published) fail("a block that is not published has pages that are cached");
      ++aside;
      cached_pages += window_pages_;
    }
    for (int client = 0; client < kMaxClients; ++client)
      if (entry.holders & bit(client)) ++held[static_cast<std::size_t>(client)];
    const std::int32_t* pages = table_ + static_cast<std::size_t>(id) * static_cast<std::size_t>(pages_per_block_);
    for (std::int32_t i = 0; i < pages_per_block_; ++i) {
      const std::int32_t page = pages[i];
      if (entry.window == Window::kGone && windowed_[static_cast<std::size_t>(i / config_.kv_heads)] != 0) {
        if (page != 0) fail("a page behind the window is still in the table");
        continue;
      }
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
  std::uint64_t aside_stamp = 0;
  for (std::int32_t id = oldest_aside_; id != kNone; id = asides_[static_cast<std::size_t>(id)].next) {
    const Aside& entry = asides_[static_cast<std::size_t>(id)];
    if (blocks_[static_cast<std::size_t>(id)].window != Window::kAside) fail("pages are cached that are in use");
    if (entry.stamp <= aside_stamp) fail("the cached pages of windows are not in order of age");
    aside_stamp = entry.stamp;
    --aside;
  }
  if (aside != 0 || used_pages != used_pages_ || owned_pages != owned_pages_ || cached_pages != cached_pages_)
    fail("page counts do not agree");
  if (used != used_blocks_ || owned != owned_blocks_ || cached != cached_blocks_ || listed != cached_blocks_)
    fail("block counts do not agree");
  if (held != held_) fail("holds of clients do not agree");
}

}  // namespace muxserve::memory
