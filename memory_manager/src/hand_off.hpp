// Blocks on their way from one engine to another, under a key and with a time limit.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "limits.hpp"

namespace muxserve::memory {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

// The waiting hand-offs of one model. Knows keys, makers and times only; what a hand-off means for its blocks is the
// ModelTable's business. Times are nanoseconds of any monotonic clock.
class HandOffs {
 public:
  std::size_t size() const { return entries_.size(); }
  // Block ids in all of them; a block that several name counts as often.
  std::int64_t ids() const { return ids_; }
  // How many of them the client of that slot has made.
  std::int64_t made_by(int client) const { return made_[static_cast<std::size_t>(client)]; }

  // All keys, in order.
  std::vector<std::string> keys() const;

  // The blocks under that key; null if there is no such key. Good until the entry is taken.
  const std::vector<std::int32_t>* find(const std::string& key) const;

  // Adds an entry; the key must be new. Throws std::bad_alloc, and then nothing has changed.
  void add(const std::string& key, std::vector<std::int32_t> blocks, std::int64_t deadline, int maker);

  // Removes the entry and returns its blocks; nothing if there is no such key.
  std::optional<std::vector<std::int32_t>> take(const std::string& key);

  // Removes one entry whose deadline is at or before `now` and returns its blocks; nothing if there is none.
  std::optional<std::vector<std::int32_t>> take_expired(std::int64_t now);

  // The client of that slot has gone; what it made waits on.
  void forget_maker(int client);

  // Calls visit(blocks) for every entry.
  template <class Visit>
  void each(Visit visit) const {
    for (const auto& entry : entries_) visit(entry.second.blocks);
  }

  // Throws std::logic_error unless counts and deadlines agree with the entries. For tests.
  void check() const;

  // The earliest deadline; kNever without entries.
  std::int64_t next_deadline() const { return by_deadline_.empty() ? kNever : by_deadline_.begin()->first; }

 private:
  static constexpr int kNobody = -1;
  using ByDeadline = std::multimap<std::int64_t, const std::string*>;  // the keys lie in entries_
  struct Entry {
    std::vector<std::int32_t> blocks;
    int maker = kNobody;
    ByDeadline::iterator deadline;
  };
  using Entries = std::map<std::string, Entry>;  // a tree: no client can choose keys that collide
  std::vector<std::int32_t> remove(Entries::iterator entry);

  Entries entries_;
  ByDeadline by_deadline_;
  std::int64_t ids_ = 0;
  std::array<std::int64_t, kMaxClients> made_{};
};

}  // namespace muxserve::memory
