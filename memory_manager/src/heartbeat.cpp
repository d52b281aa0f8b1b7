#include "heartbeat.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>

namespace muxserve::memory {

Heartbeat::Heartbeat(const std::string& path) {
  if (path.empty()) return;
  const auto slash = path.rfind('/');
  if (slash != std::string::npos) mkdir(path.substr(0, slash).c_str(), 0700);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  // A hole in the file would be filled at the first store, and on a full disk that ends the process.
  const int error = fd < 0 ? errno : posix_fallocate(fd, 0, sizeof *beats_);
  void* memory = error != 0 ? MAP_FAILED : mmap(nullptr, sizeof *beats_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    std::cerr << "muxserve-memory-manager: nobody will notice if this process hangs: cannot write \"" << path
              << "\": " << std::strerror(error != 0 ? error : errno) << std::endl;
  } else {
    beats_ = static_cast<volatile std::uint64_t*>(memory);
  }
  if (fd >= 0) close(fd);
  beat();
}

Heartbeat::~Heartbeat() {
  if (beats_ != nullptr) munmap(const_cast<std::uint64_t*>(beats_), sizeof *beats_);
}

}  // namespace muxserve::memory
