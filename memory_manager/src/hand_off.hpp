// Blocks on their way from one engine to another, under a key and with a time limit.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace muxserve::memory {

constexpr std::size_t kMaxKeyBytes = 128;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

// The waiting hand-offs of one model. Knows keys and times only; what a hand-off means for its blocks is the
// ModelTable's business. Times are nanoseconds of any monotonic clock.
class HandOffs {
 public:
  bool contains(const std::string& key) const { return entries_.count(key) != 0; }
  std::size_t size() const { return entries_.size(); }

  // All keys, in no order.
  std::vector<std::string> keys() const;

  // Adds an entry; the key must be new.
  void add(const std::string& key, std::vector<std::int32_t> blocks, std::int64_t deadline);

  // Removes the entry and returns its blocks; nothing if there is no such key.
  std::optional<std::vector<std::int32_t>> take(const std::string& key);

  // Removes one entry whose deadline is at or before `now` and returns its blocks; nothing if there is none.
  std::optional<std::vector<std::int32_t>> take_expired(std::int64_t now);

  // The earliest deadline; kNever without entries.
  std::int64_t next_deadline() const { return by_deadline_.empty() ? kNever : by_deadline_.begin()->first; }

 private:
  using ByDeadline = std::multimap<std::int64_t, std::string>;
  struct Entry {
    std::vector<std::int32_t> blocks;
    ByDeadline::iterator deadline;
  };
  std::unordered_map<std::string, Entry> entries_;
  ByDeadline by_deadline_;
};

}  // namespace muxserve::memory
