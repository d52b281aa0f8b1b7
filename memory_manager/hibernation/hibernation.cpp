#include "hibernation/hibernation.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include "clock.hpp"
#include "descriptors.hpp"

namespace muxserve::memory {
namespace {

// Bits of an entry of /proc/self/pagemap (admin-guide/mm/pagemap of the Linux kernel).
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kOfFileOrShared = std::uint64_t{1} << 61;
constexpr std::uint64_t kExclusive = std::uint64_t{1} << 56;
// Written at a time; between two of them it is looked whether the time is over. Larger writes make the kernel look for
// larger pages than those that have just become free, which took four times as long in a virtual machine.
constexpr std::size_t kPieceBytes = std::size_t{64} << 10;
// Asked for at a time of the file system: at least a piece.
constexpr off_t kPromisedBytes = off_t{32} << 20;
// So many move in one call that are new to the file; the others stay until the next one.
constexpr std::size_t kMostPieces = 1 << 14;
// The file reaches so far beyond what is in use. An allocator that lets a mapping of the file grow gets pages behind
// it, and one beyond the file's end could not be touched.
constexpr std::uint64_t kBeyond = std::uint64_t{1} << 36;
// glibc reserves the heaps of threads in aligned areas of this size, without access to what is not in use yet.
constexpr std::uintptr_t kThreadHeapBytes = std::uintptr_t{64} << 20;

std::string reason(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

struct Area {
  std::uintptr_t begin;
  std::uintptr_t end;
  bool inaccessible;
  bool anonymous;  // private, writable and of no file
  bool moved;      // of the file
  std::uint64_t offset;
};

// What must not be replaced: memory that is locked, that children do not get or get empty, huge pages, devices.
bool must_stay(const std::string& flags) {
  std::istringstream words(flags);
  for (std::string flag; words >> flag;)
    for (const char* refused : {"lo", "dc", "wf", "ht", "io", "pf", "dp", "sh", "ex"})
      if (flag == refused) return true;
  return false;
}

// The mappings as `file_name` has them: /proc/self/maps, or smaps, which says more and takes ten times as long; then
// those that must not be replaced are added to `special`.
std::vector<Area> areas(const char* file_name, const struct stat& file,
                        std::vector<std::pair<std::uintptr_t, std::uintptr_t>>& special) {
  std::ifstream maps(file_name);
  if (!maps) throw HibernationError(reason("cannot read what is mapped"));
  std::vector<Area> found;
  for (std::string line; std::getline(maps, line);) {
    Area area{};
    char access[5] = {};
    unsigned device_major = 0;
    unsigned device_minor = 0;
    std::uint64_t inode = 0;
    int name = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s %" SCNx64 " %x:%x %" SCNu64 " %n", &area.begin,
                    &area.end, access, &area.offset, &device_major, &device_minor, &inode, &name) == 7) {
      const std::string path = line.substr(static_cast<std::size_t>(name));
      const bool writable = std::strcmp(access, "rw-p") == 0;
      area.inaccessible = std::strncmp(access, "---", 3) == 0;
      area.anonymous = writable && inode == 0 && (path.empty() || path == "[heap]" || path.compare(0, 5, "[anon") == 0);
      area.moved =
          writable && inode == file.st_ino && device_major == major(file.st_dev) && device_minor == minor(file.st_dev);
      found.push_back(area);
    } else if (line.compare(0, 8, "VmFlags:") == 0 && !found.empty() && must_stay(line.substr(8))) {
      special.emplace_back(found.back().begin, found.back().end);
    }
  }
  for (Area& area : found)
    for (const auto& [begin, end] : special)
      if (area.begin < end && begin < area.end) area.anonymous = area.moved = false;
  // A thread's heap that has shrunk is taken to be zero where it grows again, and behind a file it would not be.
  const std::size_t count = found.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (!found[i].inaccessible || found[i].end % kThreadHeapBytes != 0) continue;
    const std::uintptr_t heap = found[i].end - kThreadHeapBytes;
    for (std::size_t j = i; j-- > 0 && found[j].end > heap;) {
      if (found[j].begin >= heap)
        found[j].anonymous = false;
      else
        found[j].end = heap;
    }
  }
  return found;
}

class Pagemap {
 public:
  explicit Pagemap(std::size_t page) : page_(page), file_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {
    if (!file_) throw HibernationError(reason("cannot read /proc/self/pagemap"));
  }

  // The entries of the pages from `begin` to `end`, as many as the buffer holds at most.
  const std::vector<std::uint64_t>& read(std::uintptr_t begin, std::uintptr_t end) {
    entries_.resize(std::min((end - begin) / page_, kEntries));
    const std::size_t bytes = entries_.size() * sizeof(std::uint64_t);
    const auto at = static_cast<off_t>(begin / page_ * sizeof(std::uint64_t));
    if (pread(file_.get(), entries_.data(), bytes, at) != static_cast<ssize_t>(bytes))
      throw HibernationError(reason("cannot read /proc/self/pagemap"));
    return entries_;
  }

 private:
  static constexpr std::size_t kEntries = 1 << 16;
  std::size_t page_;
  Descriptor file_;
  std::vector<std::uint64_t> entries_;
};

std::uint64_t number_in(const char* path, const char* key) {
  std::ifstream file(path);
  for (std::string word; file >> word;)
    if (word == key || *key == '\0') {
      if (*key != '\0') file >> word;
      return std::strtoull(word.c_str(), nullptr, 10);
    }
  return 0;
}

class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

// Pages next to each other.
struct Hibernation::Run {
  std::uintptr_t begin;
  std::size_t bytes;
  bool moved;  // they have a place in the file, at `offset`
  std::uint64_t offset;
};

Hibernation::Hibernation(int fd, std::size_t min_bytes) : fd_(fd), min_bytes_(min_bytes) {}

void Hibernation::move_out(const Run& run, std::size_t done, std::size_t bytes) {
  // From the first byte that is written on, memory must not change until its mapping has: it may be this object's, or
  // the run's. So all that counts is in variables of this function.
  char* const address = reinterpret_cast<char*>(run.begin + done);
  const bool moved = run.moved;
  const std::uint64_t offset = moved ? run.offset + done : used_;
  const int fd = fd_;
  // Space that is promised cannot lack later, when the kernel writes the pages out.
  if (!moved && offset + bytes > promised_) {
    if (fallocate(fd, 0, static_cast<off_t>(promised_), kPromisedBytes) != 0 && errno != EOPNOTSUPP)
      throw HibernationError(reason("no room for sleeping memory"));
    promised_ += kPromisedBytes;
  }
  int failure = 0;
  std::size_t written = 0;
  while (written < bytes && failure == 0) {
    const ssize_t now = pwrite(fd, address + written, bytes - written, static_cast<off_t>(offset + written));
    if (now > 0)
      written += static_cast<std::size_t>(now);
    else if (now == 0 || errno != EINTR)
      failure = now == 0 ? ENOSPC : errno;
  }
  if (failure == 0 && moved) {
    if (madvise(address, bytes, MADV_DONTNEED) != 0) failure = errno;
  } else if (failure == 0) {
    void* const mapped =
        mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, static_cast<off_t>(offset));
    // What was there may be gone: nothing can be trusted any more.
    if (mapped == MAP_FAILED) std::abort();
  }
  // What this object itself has allocated and freed since it looked is not there any more.
  if (failure == EFAULT) return;
  errno = failure;
  if (failure != 0) throw HibernationError(reason("cannot write sleeping memory"));
  if (moved) return;
  used_ = offset + bytes;
  const std::uintptr_t begin = run.begin + done;
  if (!places_.empty() && places_.back().offset + places_.back().bytes == offset &&
      places_.back().address + places_.back().bytes == begin)
    places_.back().bytes += bytes;
  else
    places_.push_back({offset, begin, bytes});
}

// A mapping of the file that has grown, or was moved, shows parts of the file that are of other addresses.
bool Hibernation::has_place(std::uintptr_t address, std::uint64_t offset) const {
  auto place = std::upper_bound(places_.begin(), places_.end(), offset,
                                [](std::uint64_t at, const Place& each) { return at < each.offset; });
  if (place == places_.begin()) return false;
  --place;
  return offset - place->offset < place->bytes && address - place->address == offset - place->offset;
}

Hibernation::Moved Hibernation::move(double seconds) {
  if (number_in("/proc/self/status", "Threads:") != 1) throw HibernationError("the process has other threads");
  struct stat file{};
  if (fstat(fd_, &file) != 0) throw HibernationError(reason("cannot look at the file"));
  if (static_cast<std::uint64_t>(file.st_size) < used_ + kBeyond / 2 &&
      ftruncate(fd_, static_cast<off_t>(used_ + kBeyond)) != 0)
    throw HibernationError(reason("cannot make the file large enough"));
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

  // Nothing of this object's may be allocated anew while memory moves.
  places_.reserve(places_.size() + kMostPieces);
  std::vector<Run> runs;
  {
    const std::vector<Area> found = areas(looked_ ? "/proc/self/maps" : "/proc/self/smaps", file, special_);
    looked_ = true;
    // Each new piece splits a mapping into three at most; half of those that a process may have stay free.
    const std::uint64_t most = number_in("/proc/sys/vm/max_map_count", "") / 2;
    std::size_t left = most > found.size() ? (most - found.size()) / 2 : 0;
    left = std::min(left, places_.capacity() - places_.size());
    Pagemap pagemap(page);
    for (const Area& area : found) {
      if (!area.anonymous && !area.moved) continue;
      Run run{area.begin, 0, area.moved, 0};
      const auto finish = [&] {
        if (run.bytes > 0 && (run.moved || (run.bytes >= min_bytes_ && left > 0))) {
          if (!run.moved) --left;
          run.offset = area.offset + (run.begin - area.begin);
          runs.push_back(run);
        }
      };
      for (std::uintptr_t at = area.begin; at < area.end;) {
        for (const std::uint64_t entry : pagemap.read(at, area.end)) {
          const bool ours = (entry & (kPresent | kExclusive | kOfFileOrShared)) == (kPresent | kExclusive);
          const bool moved = ours && area.moved && has_place(at, area.offset + (at - area.begin));
          if (!ours || moved != run.moved) {
            finish();
            run.bytes = 0;
          }
          if (ours && run.bytes == 0) {
            run.begin = at;
            run.moved = moved;
          }
          if (ours) run.bytes += page;
          at += page;
        }
      }
      finish();
    }
  }

  const std::int64_t until = clock_now() + static_cast<std::int64_t>(seconds * 1e9);
  std::uint64_t bytes = 0;
  bool all = true;
  const WithoutSignals without_signals;
  for (std::size_t i = 0; i < runs.size() && all; ++i) {
    for (std::size_t done = 0; done < runs[i].bytes && all;) {
      if (clock_now() >= until) {
        all = false;
        break;
      }
      const std::size_t piece = std::min(kPieceBytes, runs[i].bytes - done);
      move_out(runs[i], done, piece);
      done += piece;
      bytes += piece;
    }
  }
  return {bytes, all};
}

}  // namespace muxserve::memory
