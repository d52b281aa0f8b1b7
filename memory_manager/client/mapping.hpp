// The manager's memory as a client sees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "counters.hpp"

namespace muxserve::memory {

// A segment cannot be mapped; what() says why.
class MappingError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One shared memory segment mapped into this process until the last user of the object is gone.
class Mapping {
 public:
  // Maps `bytes` bytes of segment `name`. Throws MappingError, also if the segment is smaller.
  Mapping(const std::string& name, std::size_t bytes, bool writable);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // Whether the name still means the memory that is mapped here.
  bool current() const;

 private:
  std::string name_;
  std::size_t bytes_;
  void* data_ = nullptr;
  std::uint64_t device_ = 0;
  std::uint64_t inode_ = 0;
};

// Live counters of one model and its pool; reading one costs a load from memory.
class CountersView {
 public:
  CountersView(std::shared_ptr<Mapping> mapping, std::size_t pool, std::size_t model, std::int64_t pages_per_block,
               std::int64_t num_blocks);

  std::int64_t free_pages() const { return load(pool_->free_pages); }
  std::int64_t pool_cached_pages() const { return load(pool_->cached_pages); }
  std::int64_t room_pages() const { return load(pool_->room_pages); }
  std::int64_t backed_pages() const { return load(pool_->backed_pages); }
  std::int64_t used_pages() const { return load(model_->used_pages); }
  std::int64_t cached_pages() const { return load(model_->cached_pages); }
  std::int64_t quota_pages() const { return load(model_->quota_pages); }
  // Blocks that could be reserved now. A hint: others may be quicker.
  std::int64_t available_blocks() const;
  // Of the manager behind the counters, 0 if it has ended.
  std::uint64_t generation() const { return counters_->generation.load(std::memory_order_acquire); }

 private:
  std::shared_ptr<Mapping> mapping_;
  const Counters* counters_;
  const PoolCounters* pool_;
  const ModelCounters* model_;
  std::int64_t pages_per_block_;
  std::int64_t num_blocks_;
};

// Held while a client writes into pages, so that a manager started meanwhile waits before it gives them to others.
class WriteGuard {
 public:
  // Throws MappingError.
  WriteGuard(const std::string& prefix, std::uint64_t generation);
  ~WriteGuard();
  WriteGuard(const WriteGuard&) = delete;
  WriteGuard& operator=(const WriteGuard&) = delete;

  // False if the generation is over: nothing may be written then, and nothing is held. Not to be nested.
  bool acquire();
  void release();

 private:
  Mapping counters_;
  std::uint64_t generation_;
  int fd_ = -1;
};

}  // namespace muxserve::memory
