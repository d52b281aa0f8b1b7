#include "hand_off.hpp"

#include <stdexcept>

namespace muxserve::memory {

std::vector<std::string> HandOffs::keys() const {
  std::vector<std::string> keys;
  keys.reserve(entries_.size());
  for (const auto& entry : entries_) keys.push_back(entry.first);
  return keys;
}

const std::vector<std::int32_t>* HandOffs::find(const std::string& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second.blocks;
}

void HandOffs::add(const std::string& key, std::vector<std::int32_t> blocks, std::int64_t deadline, int maker) {
  const auto at = entries_.emplace(key, Entry{std::move(blocks), maker, {}}).first;
  try {
    at->second.deadline = by_deadline_.emplace(deadline, &at->first);
  } catch (...) {
    entries_.erase(at);
    throw;
  }
  ids_ += static_cast<std::int64_t>(at->second.blocks.size());
  ++made_[static_cast<std::size_t>(maker)];
}

std::vector<std::int32_t> HandOffs::remove(Entries::iterator entry) {
  std::vector<std::int32_t> blocks = std::move(entry->second.blocks);
  ids_ -= static_cast<std::int64_t>(blocks.size());
  if (entry->second.maker != kNobody) --made_[static_cast<std::size_t>(entry->second.maker)];
  by_deadline_.erase(entry->second.deadline);
  entries_.erase(entry);
  return blocks;
}

std::optional<std::vector<std::int32_t>> HandOffs::take(const std::string& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  return remove(found);
}

std::optional<std::vector<std::int32_t>> HandOffs::take_expired(std::int64_t now) {
  if (by_deadline_.empty() || by_deadline_.begin()->first > now) return std::nullopt;
  return remove(entries_.find(*by_deadline_.begin()->second));
}

void HandOffs::check() const {
  std::int64_t ids = 0;
  std::array<std::int64_t, kMaxClients> made{};
  for (const auto& [key, entry] : entries_) {
    ids += static_cast<std::int64_t>(entry.blocks.size());
    if (entry.maker != kNobody) ++made[static_cast<std::size_t>(entry.maker)];
    if (entry.blocks.empty() || *entry.deadline->second != key)
      throw std::logic_error("hand-off \"" + key + "\" is wrong");
  }
  if (by_deadline_.size() != entries_.size() || ids != ids_ || made != made_)
    throw std::logic_error("counts of hand-offs do not agree");
}

void HandOffs::forget_maker(int client) {
  if (made_by(client) == 0) return;
  for (auto& entry : entries_)
    if (entry.second.maker == client) entry.second.maker = kNobody;
  made_[static_cast<std::size_t>(client)] = 0;
}

}  // namespace muxserve::memory
