#include "prefix_index.hpp"

#include <cassert>
#include <cstring>

namespace muxserve::memory {
namespace {

// The two halves of a product of 128 bits, folded: every bit of both numbers reaches every bit of the result.
std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

PrefixIndex::PrefixIndex(std::int32_t num_blocks, std::uint64_t seed) {
  for (std::uint64_t& key : keys_) {  // splitmix64
    std::uint64_t z = seed += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    key = z ^ (z >> 31);
  }
  std::size_t capacity = 16;
  while (capacity < 2 * static_cast<std::size_t>(num_blocks)) capacity *= 2;
  mask_ = capacity - 1;
  slots_.assign(capacity, -1);
  hashes_.resize(static_cast<std::size_t>(num_blocks));
  published_.assign(static_cast<std::size_t>(num_blocks), 0);
}

std::size_t PrefixIndex::home(const Hash& hash) const {
  std::array<std::uint64_t, 4> words;
  static_assert(sizeof words == kHashBytes);
  std::memcpy(words.data(), hash.data(), sizeof words);
  const std::uint64_t first = fold(words[0] ^ keys_[0], words[1] ^ keys_[1]);
  const std::uint64_t second = fold(words[2] ^ keys_[2], words[3] ^ keys_[3]);
  return static_cast<std::size_t>(fold(first ^ keys_[1], second ^ keys_[2])) & mask_;
}

std::size_t PrefixIndex::probes(const Hash& hash) const {
  std::size_t count = 1;
  for (std::size_t slot = home(hash); slots_[slot] >= 0; slot = (slot + 1) & mask_, ++count)
    if (hashes_[static_cast<std::size_t>(slots_[slot])] == hash) break;
  return count;
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
