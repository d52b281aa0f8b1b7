// Content hashes of one model's published blocks: which block holds this content?
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace muxserve::memory {

constexpr std::size_t kHashBytes = 32;
using Hash = std::array<std::uint8_t, kHashBytes>;

// A hash table with linear probing over block ids; the hashes themselves lie in an array by block. Sized for every
// block at once, so that no operation allocates.
class PrefixIndex {
 public:
  // `num_blocks` bounds the block ids; `seed`, which clients must not know, keeps them from choosing hashes that
  // collide here.
  PrefixIndex(std::int32_t num_blocks, std::uint64_t seed);

  // The block published under that hash, or -1.
  std::int32_t find(const Hash& hash) const;

  // Whether the block is published.
  bool contains(std::int32_t block) const { return published_[static_cast<std::size_t>(block)] != 0; }

  // Publishes the block. Nothing happens if the hash or the block is there already: the first one wins.
  void insert(std::int32_t block, const Hash& hash);

  // Forgets the block; it must be published.
  void erase(std::int32_t block);

  std::int64_t size() const { return size_; }

  // How many slots are looked at to find that hash, or that it is not there. For tests.
  std::size_t probes(const Hash& hash) const;

 private:
  std::size_t home(const Hash& hash) const;

  std::array<std::uint64_t, 4> keys_{};
  std::size_t mask_;
  std::int64_t size_ = 0;
  std::vector<std::int32_t> slots_;  // block id, or -1
  std::vector<Hash> hashes_;         // by block
  std::vector<std::uint8_t> published_;
};

}  // namespace muxserve::memory
