// Memory of this process that nobody needs for a while moves behind a file.
//
// A process that sleeps keeps its addresses, and the file system keeps what is behind them: the kernel can take the
// memory whenever it needs it, as it can with any file's, and a process that is forked from the sleeping one finds
// everything where it was. It is what swapping does, for one process, and without swap space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muxserve::memory {

// Something cannot be moved; everything is where it was, or where it was moved before.
class HibernationError : public std::runtime_error {
 public:
  explicit HibernationError(const std::string& what) : std::runtime_error(what) {}
};

class Hibernation {
 public:
  // `fd`: an empty file, open for reading and writing, which must stay open and which nobody else writes to. Memory
  // that is not behind it yet moves in pieces of at least `min_bytes`, since each is a mapping of its own, of which a
  // process can have 65,530.
  Hibernation(int fd, std::size_t min_bytes);

  struct Moved {
    std::uint64_t bytes;
    bool all;  // false: the time was over before
  };

  // Moves private memory that no other process shares (so of a forked process only what it has written itself) until
  // all has moved, or for that long, besides the time to look for it. Pages that were written to since they moved are
  // written to their place in the file and dropped. Nothing else may run in the process: no thread, no signal handler.
  // Processes that were forked from it have ended: they would see what changes in the file.
  //
  // Memory that must not move (locked, or not given to children) is looked for in the first call only.
  //
  // Throws HibernationError: there are other threads, the kernel does not show the process its pages, or the file does
  // not take more (a full disk, a limit).
  Moved move(double seconds);

  // How many bytes of the file are in use.
  std::uint64_t file_bytes() const { return used_; }

 private:
  struct Run;
  // What lies at `offset` of the file, and which addresses it belongs to.
  struct Place {
    std::uint64_t offset;
    std::uintptr_t address;
    std::size_t bytes;
  };

  bool has_place(std::uintptr_t address, std::uint64_t offset) const;
  void move_out(const Run& run, std::size_t done, std::size_t bytes);

  const int fd_;
  const std::size_t min_bytes_;
  std::uint64_t used_ = 0;
  std::uint64_t promised_ = 0;
  std::vector<Place> places_;  // by offset
  bool looked_ = false;
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> special_;  // from, to
};

}  // namespace muxserve::memory
