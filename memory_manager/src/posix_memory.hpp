// POSIX shared memory: segments that keep their names over a restart of the manager.
//
// Names are <prefix>.counters, <prefix>.guard, <prefix>.table.<i>, <prefix>.pool.<i>, and <prefix>.pool.<i>.<rank> on
// ranks above 0. A manager that is killed leaves
// its segments; the next one with the same configuration opens the very same ones, so clients' mappings stay good.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool_memory.hpp"
#include "segments.hpp"

namespace muxserve::memory {

// Shared memory cannot be set up; what() says why and what to do.
class MemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One segment of shared memory.
class PosixSegment {
 public:
  enum class Use {
    kSparse,  // only the file descriptor is kept; memory is taken where clients write
    kMapped,  // mapped into this process, all of its memory reserved: nothing that happens to /dev/shm later can make
              // reading or writing it fail (with SIGBUS)
  };

  // Opens `name` (without the leading slash), or creates it. An existing segment of another size is replaced by a new
  // one. Throws MemoryError, and then nothing is left that was not there before.
  PosixSegment(const std::string& name, std::size_t bytes, Use use);
  ~PosixSegment();
  PosixSegment(const PosixSegment&) = delete;
  PosixSegment& operator=(const PosixSegment&) = delete;

  void* data() const { return data_; }
  int fd() const { return fd_; }
  std::size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }
  bool existed() const { return existed_; }
  // Gives the memory of this part back; it reads as zeros then. Both are multiples of a page of the kernel, but for the
  // end of the segment.
  void punch(std::size_t offset, std::size_t bytes) noexcept;
  // Takes the name away. Whoever has the segment open or mapped keeps it.
  void unlink() noexcept;

 private:
  void open_or_create();
  void reserve();
  void map();
  [[noreturn]] void give_up(const std::string& what);

  std::string name_;
  std::string path_;
  std::size_t bytes_;
  int fd_ = -1;
  void* data_ = nullptr;
  bool existed_ = false;
};

// What the segment of a pool on a rank is called.
std::string pool_segment(const std::string& prefix, std::size_t pool, std::int64_t rank);

// A segment that is going to be made.
struct SegmentSize {
  std::string name;
  std::size_t bytes = 0;
};

// Shared memory is a file system that may be smaller than what is to lie in it, and running out of it later kills
// whoever writes into a sparse segment. Throws MemoryError, with words on what to do, unless everything in `wanted`
// fits at once; what existing segments of these names have already taken counts as there.
void check_shared_memory(const std::vector<SegmentSize>& wanted);

// A pool in a sparse segment: memory is taken page by page as engines write.
class PosixPoolMemory final : public PoolMemory {
 public:
  // Throws MemoryError.
  PosixPoolMemory(const std::string& name, std::size_t bytes) : segment_(name, bytes, PosixSegment::Use::kSparse) {}
  std::string handle() const override { return "posix:" + segment_.name(); }
  void give_back(std::size_t offset, std::size_t bytes) noexcept override { segment_.punch(offset, bytes); }
  void take_again(std::size_t, std::size_t) override {}  // where engines write
  void destroy() override { segment_.unlink(); }

 private:
  PosixSegment segment_;
};

// Page tables and counters of one manager. At most one manager at a time uses a prefix; that is enforced with a file
// lock, which the kernel drops when the manager dies.
class PosixSegments final : public Segments {
 public:
  // Waits up to `settle` for clients that are writing into the pool under the page tables of an earlier manager: their
  // pages must not be given to others meanwhile. Holds them off until settled() is called. Throws MemoryError.
  PosixSegments(const std::string& prefix, std::chrono::milliseconds settle);

  Counters& counters() override { return *static_cast<Counters*>(counters_.data()); }
  std::int32_t* create_table(std::uint32_t model, std::size_t entries) override;
  void destroy_table(std::uint32_t model) noexcept override;
  std::string table_name(std::uint32_t model) const override;

  // Tables are reset and the new generation stands in the counters: clients may look again.
  void settled();

  // Removes segments of this prefix that are not in use by this object, except those named in `kept`.
  void remove_stale(const std::vector<std::string>& kept);

  // Tells clients that keep their mappings that nobody is there, and removes every segment of the prefix.
  void remove_all();

 private:
  std::string prefix_;
  PosixSegment counters_;
  PosixSegment guard_;
  std::map<std::uint32_t, std::unique_ptr<PosixSegment>> tables_;
};

}  // namespace muxserve::memory
