#include "posix_memory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

namespace muxserve::memory {
namespace {

constexpr char kDirectory[] = "/dev/shm";

[[noreturn]] void fail(const std::string& what) { throw MemoryError(what + ": " + std::strerror(errno)); }

std::string mebibytes(std::uint64_t bytes) { return std::to_string((bytes + (1u << 20) - 1) >> 20) + " MiB"; }

// Shared memory is a file system that may be smaller than the pool; running out of it later kills whoever writes.
void check_space(std::size_t bytes, std::uint64_t already) {
  struct statvfs fs{};
  if (statvfs(kDirectory, &fs) != 0) return;  // not where this system keeps shared memory: nothing to check
  const std::uint64_t available = static_cast<std::uint64_t>(fs.f_bavail) * fs.f_frsize + already;
  if (fs.f_blocks != 0 && available < bytes) {
    throw MemoryError("the pool needs " + mebibytes(bytes) + " of shared memory, " + kDirectory + " has " +
                      mebibytes(available) + " left: make the pool smaller or " + kDirectory +
                      " larger (containers: --shm-size)");
  }
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

PosixSegment::PosixSegment(const std::string& name, std::size_t bytes, bool map) : name_(name), bytes_(bytes) {
  const std::string path = "/" + name;
  fd_ = shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd_ >= 0) {
    struct stat status{};
    if (fstat(fd_, &status) == 0 && status.st_size == static_cast<off_t>(bytes)) {
      existed_ = true;
    } else {
      // Another size: a new segment, so that nobody who has the old one mapped reads beyond its end.
      close(fd_);
      shm_unlink(path.c_str());
      fd_ = -1;
    }
  } else if (errno != ENOENT) {
    fail("cannot open shared memory " + name);
  }
  if (fd_ < 0) {
    fd_ = shm_open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd_ < 0) fail("cannot create shared memory " + name);
    if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
      const int error = errno;
      close(fd_);
      shm_unlink(path.c_str());
      errno = error;
      fail("cannot make shared memory " + name + " " + mebibytes(bytes) + " large");
    }
  }
  if (!map) return;
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    const int error = errno;
    close(fd_);
    errno = error;
    fail("cannot map shared memory " + name);
  }
}

PosixSegment::~PosixSegment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

std::string pool_segment(const std::string& prefix, std::size_t pool, std::int64_t rank) {
  const std::string name = prefix + ".pool." + std::to_string(pool);
  return rank == 0 ? name : name + "." + std::to_string(rank);
}

PosixPoolMemory::PosixPoolMemory(const std::string& name, std::size_t bytes) : segment_(name, bytes, false) {
  struct stat status{};
  const bool known = fstat(segment_.fd(), &status) == 0;
  try {
    check_space(bytes, known ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0);
  } catch (const MemoryError&) {
    if (!segment_.existed()) destroy();
    throw;
  }
}

void PosixPoolMemory::destroy() { shm_unlink(("/" + segment_.name()).c_str()); }

PosixSegments::PosixSegments(const std::string& prefix, std::chrono::milliseconds settle)
    : prefix_(prefix), counters_(prefix + ".counters", sizeof(Counters), true), guard_(prefix + ".guard", 8, false) {
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
  }
  for (ModelCounters& model : counters.models) {
    store(model.used_pages, 0);
    store(model.cached_pages, 0);
    store(model.quota_pages, 0);
  }
}

std::string PosixSegments::table_name(std::uint32_t model) const { return prefix_ + ".table." + std::to_string(model); }

std::int32_t* PosixSegments::create_table(std::uint32_t model, std::size_t entries) {
  auto segment = std::make_unique<PosixSegment>(table_name(model), entries * sizeof(std::int32_t), true);
  if (segment->existed()) std::memset(segment->data(), 0, segment->bytes());
  auto* table = static_cast<std::int32_t*>(segment->data());
  tables_[model] = std::move(segment);
  return table;
}

void PosixSegments::destroy_table(std::uint32_t model) {
  tables_.erase(model);
  shm_unlink(("/" + table_name(model)).c_str());
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
