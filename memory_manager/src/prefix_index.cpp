#include "prefix_index.hpp"

#include <cassert>
#include <cstring>

namespace muxserve::memory {

PrefixIndex::PrefixIndex(std::int32_t num_blocks, std::uint64_t seed) : seed_(seed | 1) {
  std::size_t capacity = 16;
  while (capacity < 2 * static_cast<std::size_t>(num_blocks)) capacity *= 2;
  mask_ = capacity - 1;
  slots_.assign(capacity, -1);
  hashes_.resize(static_cast<std::size_t>(num_blocks));
  published_.assign(static_cast<std::size_t>(num_blocks), 0);
}

std::size_t PrefixIndex::home(const Hash& hash) const {
  std::uint64_t mixed = seed_;
  for (std::size_t i = 0; i < kHashBytes; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, hash.data() + i, 8);
    mixed = (mixed ^ word) * 0x9E3779B97F4A7C15ULL;
    mixed ^= mixed >> 29;
  }
  return static_cast<std::size_t>(mixed) & mask_;
}

std::int32_t PrefixIndex::find(const Hash& hash) const {
  for (std::size_t slot = home(hash);; slot = (slot + 1) & mask_) {
    const std::int32_t block = slots_[slot];
    if (block < 0) return -1;
    if (hashes_[static_cast<std::size_t>(block)] == hash) return block;
  }
}

void PrefixIndex::insert(std::int32_t block, const Hash& hash) {
  if (contains(block)) return;
  std::size_t slot = home(hash);
  while (slots_[slot] >= 0) {
    if (hashes_[static_cast<std::size_t>(slots_[slot])] == hash) return;
    slot = (slot + 1) & mask_;
  }
  slots_[slot] = block;
  hashes_[static_cast<std::size_t>(block)] = hash;
  published_[static_cast<std::size_t>(block)] = 1;
  ++size_;
}

void PrefixIndex::erase(std::int32_t block) {
  assert(contains(block));
  std::size_t gap = home(hashes_[static_cast<std::size_t>(block)]);
  while (slots_[gap] != block) gap = (gap + 1) & mask_;
  published_[static_cast<std::size_t>(block)] = 0;
  --size_;
  // Move later entries of the run back into the gap, so that probing never needs tombstones.
  for (std::size_t slot = (gap + 1) & mask_; slots_[slot] >= 0; slot = (slot + 1) & mask_) {
    const std::size_t wanted = home(hashes_[static_cast<std::size_t>(slots_[slot])]);
    if (((slot - wanted) & mask_) >= ((slot - gap) & mask_)) {
      slots_[gap] = slots_[slot];
      gap = slot;
    }
  }
  slots_[gap] = -1;
}

}  // namespace muxserve::memory
