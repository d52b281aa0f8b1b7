// The blocks of one model: who holds each, which are cached, and the page table behind them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "config.hpp"
#include "counters.hpp"
#include "hand_off.hpp"
#include "page_pool.hpp"
#include "prefix_index.hpp"
#include "span.hpp"

namespace muxserve::memory {

// Numbers of one model for statistics.
struct ModelStatistics {
  std::int64_t owned_pages = 0;
  std::int64_t handed_pages = 0;
  std::int64_t cached_pages = 0;
  std::int64_t evictions = 0;  // cached blocks whose pages were taken for others
  std::int64_t lookups = 0;    // hashes asked for
  std::int64_t hits = 0;       // blocks found for them
  std::int64_t expired = 0;    // hand-offs nobody adopted in time
  std::int64_t published = 0;  // blocks that can be found by hash now
  std::int64_t hand_offs = 0;  // waiting now
};

// A block is FREE, OWNED (at least one holder), HANDED (no holder, in at least one hand-off) or CACHED (neither, but
// published; its pages may be taken at any time, least recently used first). `used` blocks are the owned and the
// handed ones; they count against the quota.
//
// The pages of windowed layers in a block are given up when the block is behind the window of the one sequence that it
// belongs to (leave_window). If the block is published they are cached on their own: they may be taken at any time,
// and come back into use where a lookup needs them.
//
// Every operation that takes block ids from a client checks all of them before anything changes.
class ModelTable {
 public:
  // `table` has num_blocks * pages_per_block zeroed entries; row 0 stays zero, which is the null page.
  ModelTable(ModelConfig config, std::uint32_t index, std::uint32_t pool_index, PagePool& pool, std::int32_t* table,
             ModelCounters& counters, std::uint64_t seed);

  const ModelConfig& config() const { return config_; }
  std::uint32_t index() const { return index_; }
  std::uint32_t pool_index() const { return pool_index_; }
  PagePool& pool() { return pool_; }
  const std::int32_t* table() const { return table_; }
  std::int64_t used_pages() const { return used_pages_; }
  std::int64_t cached_pages() const { return cached_pages_; }
  std::int64_t held_blocks(int client) const { return held_[static_cast<std::size_t>(client)]; }
  // Takes time in the number of blocks where layers have a window.
  std::int64_t held_pages(int client) const;
  void set_quota(std::int64_t pages) { config_.quota_pages = pages; }
  const HandOffs& hand_offs() const { return hand_offs_; }
  // What the page table and the books of such a model take in memory, in bytes.
  static std::int64_t bytes(const ModelConfig& config);

  // Publishes blocks that the client holds, then ends its hold on `release`; the earlier a block stands in `release`,
  // the earlier it is evicted. Throws Refused(kNotOwner) if any of the ids is not held (an id twice in `release`
  // included), and then nothing has changed.
  void publish_and_release(int client, Span<std::int32_t> publish, Span<Hash> hashes, Span<std::int32_t> release);

  // Appends the blocks of the longest prefix of `hashes` that is published, now held by the client. Stops early where
  // waking a cached block would exceed the quota. With windowed layers it is the longest one whose last window_blocks
  // blocks have the pages of these layers.
  void look_up(int client, Span<Hash> hashes, std::vector<std::int32_t>& out);

  // Gives up the pages of windowed layers in these blocks, which the client holds, where nobody else has the block.
  // Throws Refused: kNotOwner, or kInvalid for a model without such layers; nothing has changed then.
  void leave_window(int client, Span<std::int32_t> blocks);

  // How many blocks could be reserved now, evicting what is cached in the pool.
  std::int64_t available_blocks() const;

  // Appends `count` new blocks held by the client. The free pages and ids must be there (see needs_own_eviction).
  void reserve(int client, std::int64_t count, std::vector<std::int32_t>& out);

  // Whether fewer than `count` block ids are free, so that own cached blocks have to go first.
  bool needs_own_eviction(std::int64_t count) const { return static_cast<std::int64_t>(free_ids_.size()) < count; }

  // Makes a hand-off of `blocks` and ends the client's hold on `release`. Every id must be held by the client; blocks
  // that it goes on using for another request (a shared prefix) are left out of `release`. Throws Refused (kNotOwner,
  // kKeyExists) or std::bad_alloc; nothing has changed then.
  void hand_off(int client, const std::string& key, Span<std::int32_t> blocks, Span<std::int32_t> release,
                std::int64_t deadline);

  // How many blocks the hand-off has. Throws Refused(kUnknownKey).
  std::size_t handed_blocks(const std::string& key) const;

  // The blocks of the hand-off, now held by the client. Throws Refused(kUnknownKey).
  std::vector<std::int32_t> adopt(int client, const std::string& key);

  // Gives up the hand-off. Throws Refused(kUnknownKey).
  void drop(const std::string& key);

  // Gives up the hand-offs whose time is over; true if there were any.
  bool expire(std::int64_t now);

  // Ends every hold of the client; the hand-offs that it has made wait on.
  void release_client(int client);

  // Forgets every hash; cached blocks become free.
  void reset_cache();

  bool has_cached() const { return oldest_ != kNone || oldest_aside_ != kNone; }
  // When what evict_oldest() frees became cached; greater is later. Only with has_cached().
  std::uint64_t oldest_stamp() const;
  // Frees the least recently used of the cached blocks and of the windowed layers' pages that are cached on their own.
  // Only with has_cached().
  void evict_oldest();
  // Frees the least recently used cached block. Only if there is one.
  void evict_oldest_block() { evict(oldest_); }

  // Says in `uses`, by page of the pool, which pages the blocks of the model use.
  void mark(std::vector<PageUse>& uses) const;
  // Frees what is cached in chunks of the pool that are vacated.
  void leave_chunks();

  ModelStatistics statistics() const;
  void show();

  // Marks in `seen` (by page) every page of a block that is not free, and throws std::logic_error where a page is met
  // twice or the books do not agree. For tests; takes time in the number of pages.
  void check(std::vector<std::uint8_t>& seen) const;

 private:
  static constexpr std::int32_t kNone = 0;  // block 0 is never on a list

  // Where the pages of windowed layers are: in the block like the others, cached on their own, or freed.
  enum class Window : std::uint8_t { kPresent, kAside, kGone };

  struct Block {
    std::uint64_t holders = 0;      // one bit per client
    std::uint64_t stamp = 0;        // of becoming cached
    std::int32_t previous = kNone;  // in the list of cached blocks, oldest first
    std::int32_t next = kNone;
    std::int32_t hand_offs = 0;
    Window window = Window::kPresent;
  };

  // The place of a block in the list of those whose windowed layers' pages are cached on their own, oldest first.
  struct Aside {
    std::uint64_t stamp = 0;
    std::int32_t previous = kNone;
    std::int32_t next = kNone;
  };

  Block& block(std::int32_t id) { return blocks_[static_cast<std::size_t>(id)]; }
  std::int32_t* row(std::int32_t id) {
    return table_ + static_cast<std::size_t>(id) * static_cast<std::size_t>(pages_per_block_);
  }
  bool known(std::int32_t id) const { return id > 0 && id < config_.num_blocks; }
  // Pages that the block has beside those that are cached on their own.
  std::int32_t pages_of(const Block& entry) const {
    return entry.window == Window::kPresent ? pages_per_block_ : pages_per_block_ - window_pages_;
  }
  Window window_of(const Hash& hash) const;
  std::size_t longest_prefix(Span<Hash> hashes) const;
  [[noreturn]] void refuse(int client, std::int32_t id) const;
  [[noreturn]] void refuse_key(const std::string& key) const;

  void clear_holds(int client, Span<std::int32_t> ids);
  void restore_holds(int client, Span<std::int32_t> ids);
  void hold(int client, std::int32_t id);
  void use(std::int32_t id);
  void unheld(std::int32_t id);
  void retire(std::int32_t id);
  void evict(std::int32_t id);
  void withdraw(std::int32_t id);
  void push_aside(std::int32_t id);
  void unlink_aside(std::int32_t id);
  void free_window(std::int32_t id);
  void free_aside(std::int32_t id);
  void push_cached(std::int32_t id);
  void unlink_cached(std::int32_t id);
  void free_block(std::int32_t id);
  void drop_blocks(const std::vector<std::int32_t>& ids);

  ModelConfig config_;
  std::uint32_t index_;
  std::uint32_t pool_index_;
  PagePool& pool_;
  std::int32_t* table_;
  ModelCounters& counters_;
  std::int32_t pages_per_block_;
  std::int32_t window_pages_;
  std::vector<std::uint8_t> windowed_;  // by layer
  std::vector<Block> blocks_;
  std::vector<Aside> asides_;  // by block; empty without windowed layers
  std::vector<std::int32_t> free_ids_;
  PrefixIndex prefixes_;
  HandOffs hand_offs_;
  std::int32_t oldest_ = kNone;
  std::int32_t newest_ = kNone;
  std::int32_t oldest_aside_ = kNone;
  std::int32_t newest_aside_ = kNone;
  std::int64_t used_blocks_ = 0;   // owned or handed
  std::int64_t owned_blocks_ = 0;  // with a holder
  std::int64_t cached_blocks_ = 0;
  std::int64_t used_pages_ = 0;
  std::int64_t owned_pages_ = 0;
  std::int64_t cached_pages_ = 0;  // with those that are cached on their own
  std::array<std::int64_t, kMaxClients> held_{};
  std::int64_t evictions_ = 0;
  std::int64_t lookups_ = 0;
  std::int64_t hits_ = 0;
  std::int64_t expired_ = 0;
};

}  // namespace muxserve::memory
