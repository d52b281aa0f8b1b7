#include "posix_memory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "text.hpp"

namespace muxserve::memory {
namespace {

constexpr char kDirectory[] = "/dev/shm";

[[noreturn]] void fail(const std::string& what) { throw MemoryError(what + ": " + std::strerror(errno)); }

std::uint64_t shared_memory_left() {
  struct statvfs fs{};
  // Without a size (f_blocks) it is as large as memory itself.
  if (statvfs(kDirectory, &fs) != 0 || fs.f_blocks == 0) return UINT64_MAX;
  return static_cast<std::uint64_t>(fs.f_bavail) * fs.f_frsize;
}

std::string advice(std::uint64_t left) {
  return std::string(kDirectory) + " has " + mebibytes(left) + " left: make the pools smaller or " + kDirectory +
         " larger (containers: --shm-size)";
}

std::vector<std::string> segments_with(const std::string& start) {
  std::vector<std::string> names;
  DIR* directory = opendir(kDirectory);
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory))
    if (std::strncmp(entry->d_name, start.c_str(), start.size()) == 0) names.emplace_back(entry->d_name);
  closedir(directory);
  return names;
}

}  // namespace

PosixSegment::PosixSegment(const std::string& name, std::size_t bytes, Use use)
    : name_(name), path_("/" + name), bytes_(bytes) {
  open_or_create();
  if (use == Use::kSparse) return;
  reserve();
  map();
}

void PosixSegment::open_or_create() {
  fd_ = shm_open(path_.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd_ >= 0) {
    struct stat status{};
    if (fstat(fd_, &status) == 0 && status.st_size == static_cast<off_t>(bytes_)) {
      existed_ = true;
      return;
    }
    // Another size: a new segment, so that nobody who has the old one mapped reads beyond its end.
    close(fd_);
    fd_ = -1;
    unlink();
  } else if (errno != ENOENT) {
    fail("cannot open shared memory " + name_);
  }
  fd_ = shm_open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd_ < 0) fail("cannot create shared memory " + name_);
  if (ftruncate(fd_, static_cast<off_t>(bytes_)) != 0)
    give_up("cannot make shared memory " + name_ + " " + mebibytes(bytes_) + " large");
}

void PosixSegment::reserve() {
  int error = 0;
  do {
    error = posix_fallocate(fd_, 0, static_cast<off_t>(bytes_));
  } while (error == EINTR);
  if (error == 0) return;
  errno = error;
  std::string what = "cannot reserve " + mebibytes(bytes_) + " of shared memory for " + name_;
  if (error == ENOSPC) what += " (" + advice(shared_memory_left()) + ")";
  errno = error;
  give_up(what);
}

void PosixSegment::map() {
  data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data_ != MAP_FAILED) return;
  data_ = nullptr;
  give_up("cannot map shared memory " + name_);
}

// The constructor fails with errno: what it has made goes.
void PosixSegment::give_up(const std::string& what) {
  const int error = errno;
  close(fd_);
  if (!existed_) unlink();
  errno = error;
  fail(what);
}

void PosixSegment::punch(std::size_t offset, std::size_t bytes) noexcept {
  const auto begin = static_cast<off_t>(offset), length = static_cast<off_t>(bytes);
  while (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, length) != 0 && errno == EINTR) continue;
}

void PosixSegment::unlink() noexcept { shm_unlink(path_.c_str()); }

PosixSegment::~PosixSegment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

std::string pool_segment(const std::string& prefix, std::size_t pool, std::int64_t rank) {
  const std::string name = prefix + ".pool." + std::to_string(pool);
  return rank == 0 ? name : name + "." + std::to_string(rank);
}

void check_shared_memory(const std::vector<SegmentSize>& wanted) {
  std::uint64_t bytes = 0, already = 0;
  for (const SegmentSize& segment : wanted) {
    bytes += segment.bytes;  // kMaxPools * kMaxRanks * kMaxPoolBytes is 2^59
    struct stat status{};
    if (stat((std::string(kDirectory) + "/" + segment.name).c_str(), &status) == 0)
      already += std::min<std::uint64_t>(segment.bytes, static_cast<std::uint64_t>(status.st_blocks) * 512);
  }
  const std::uint64_t left = shared_memory_left();
  if (bytes - already > left)
    throw MemoryError("the pools and page tables need " + mebibytes(bytes - already) + " of shared memory, " +
                      advice(left));
}

PosixSegments::PosixSegments(const std::string& prefix, std::chrono::milliseconds settle)
    : prefix_(prefix),
      counters_(prefix + ".counters", sizeof(Counters), PosixSegment::Use::kMapped),
      guard_(prefix + ".guard", 8, PosixSegment::Use::kSparse) {
  if (flock(counters_.fd(), LOCK_EX | LOCK_NB) != 0)
    throw MemoryError("another memory manager is running with the prefix \"" + prefix + "\"");
  const auto end = std::chrono::steady_clock::now() + settle;
  while (flock(guard_.fd(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) fail("cannot lock shared memory " + guard_.name());
    if (std::chrono::steady_clock::now() >= end) {
      throw MemoryError("clients of an earlier memory manager still write into the pool after " +
                        std::to_string(settle.count()) + " ms; stop them and start again");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Counters& counters = this->counters();
  counters.generation.store(0, std::memory_order_release);
  for (PoolCounters& pool : counters.pools) {
    store(pool.free_pages, 0);
    store(pool.cached_pages, 0);
    store(pool.room_pages, 0);
    store(pool.backed_pages, 0);
  }
  for (ModelCounters& model : counters.models) {
    store(model.used_pages, 0);
    store(model.cached_pages, 0);
    store(model.quota_pages, 0);
  }
}

std::string PosixSegments::table_name(std::uint32_t model) const { return prefix_ + ".table." + std::to_string(model); }

std::int32_t* PosixSegments::create_table(std::uint32_t model, std::size_t entries) {
  std::unique_ptr<PosixSegment>& segment = tables_[model];
  try {
    segment =
        std::make_unique<PosixSegment>(table_name(model), entries * sizeof(std::int32_t), PosixSegment::Use::kMapped);
  } catch (...) {
    tables_.erase(model);
    throw;
  }
  if (segment->existed()) std::memset(segment->data(), 0, segment->bytes());
  return static_cast<std::int32_t*>(segment->data());
}

void PosixSegments::destroy_table(std::uint32_t model) noexcept {
  const auto found = tables_.find(model);
  if (found == tables_.end()) return;
  found->second->unlink();
  tables_.erase(found);
}

void PosixSegments::settled() { flock(guard_.fd(), LOCK_UN); }

void PosixSegments::remove_stale(const std::vector<std::string>& kept) {
  std::set<std::string> ours{counters_.name(), guard_.name()};
  for (const auto& table : tables_) ours.insert(table.second->name());
  ours.insert(kept.begin(), kept.end());
  for (const std::string& name : segments_with(prefix_ + "."))
    if (ours.count(name) == 0) shm_unlink(("/" + name).c_str());
}

void PosixSegments::remove_all() {
  counters().generation.store(0, std::memory_order_release);
  for (const std::string& name : segments_with(prefix_ + ".")) shm_unlink(("/" + name).c_str());
}

}  // namespace muxserve::memory
