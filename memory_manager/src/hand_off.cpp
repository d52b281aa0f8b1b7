#include "hand_off.hpp"

namespace muxserve::memory {

std::vector<std::string> HandOffs::keys() const {
  std::vector<std::string> keys;
  keys.reserve(entries_.size());
  for (const auto& entry : entries_) keys.push_back(entry.first);
  return keys;
}

void HandOffs::add(const std::string& key, std::vector<std::int32_t> blocks, std::int64_t deadline) {
  const auto at = by_deadline_.emplace(deadline, key);
  entries_.emplace(key, Entry{std::move(blocks), at});
}

std::optional<std::vector<std::int32_t>> HandOffs::take(const std::string& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  std::vector<std::int32_t> blocks = std::move(found->second.blocks);
  by_deadline_.erase(found->second.deadline);
  entries_.erase(found);
  return blocks;
}

std::optional<std::vector<std::int32_t>> HandOffs::take_expired(std::int64_t now) {
  if (by_deadline_.empty() || by_deadline_.begin()->first > now) return std::nullopt;
  const std::string key = by_deadline_.begin()->second;
  return take(key);
}

}  // namespace muxserve::memory
