#include "mapping.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace muxserve::memory {

Mapping::Mapping(const std::string& name, std::size_t bytes, bool writable) : name_("/" + name), bytes_(bytes) {
  const int fd = shm_open(name_.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC, 0);
  if (fd < 0) throw MappingError("cannot open shared memory " + name + ": " + std::strerror(errno));
  struct stat status{};
  if (fstat(fd, &status) != 0 || static_cast<std::size_t>(status.st_size) < bytes) {
    close(fd);
    throw MappingError("shared memory " + name + " is smaller than the manager said");
  }
  device_ = status.st_dev;
  inode_ = status.st_ino;
  data_ = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  const int error = errno;
  close(fd);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw MappingError("cannot map shared memory " + name + ": " + std::strerror(error));
  }
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

bool Mapping::current() const {
  const int fd = shm_open(name_.c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return false;
  struct stat status{};
  const bool same = fstat(fd, &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
  close(fd);
  return same;
}

CountersView::CountersView(std::shared_ptr<Mapping> mapping, std::size_t pool, std::size_t model,
                           std::int64_t pages_per_block, std::int64_t num_blocks)
    : mapping_(std::move(mapping)),
      counters_(static_cast<const Counters*>(mapping_->data())),
      pages_per_block_(pages_per_block),
      num_blocks_(num_blocks) {
  if (mapping_->bytes() < sizeof(Counters) || pool >= kMaxPools || model >= kMaxModels || pages_per_block <= 0)
    throw MappingError("the counters do not have such a pool or model");
  pool_ = &counters_->pools[pool];
  model_ = &counters_->models[model];
}

std::int64_t CountersView::available_blocks() const {
  const std::int64_t used = used_pages();
  const std::int64_t pages = std::min(quota_pages() - used, free_pages() + pool_cached_pages());
  const std::int64_t ids = num_blocks_ - 1 - used / pages_per_block_;
  return std::max<std::int64_t>(0, std::min(pages / pages_per_block_, ids));
}

WriteGuard::WriteGuard(const std::string& prefix, std::uint64_t generation)
    : counters_(prefix + ".counters", sizeof(Counters), false), generation_(generation) {
  const std::string name = "/" + prefix + ".guard";
  fd_ = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd_ < 0) throw MappingError("cannot open shared memory " + prefix + ".guard: " + std::strerror(errno));
}

WriteGuard::~WriteGuard() {
  if (fd_ >= 0) close(fd_);
}

bool WriteGuard::acquire() {
  while (flock(fd_, LOCK_SH) != 0)
    if (errno != EINTR) return false;
  const auto* counters = static_cast<const Counters*>(counters_.data());
  if (counters->generation.load(std::memory_order_acquire) == generation_) return true;
  release();
  return false;
}

void WriteGuard::release() { flock(fd_, LOCK_UN); }

}  // namespace muxserve::memory
