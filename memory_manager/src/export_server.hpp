// Hands out the descriptors of pools, on a socket of its own: what the manager does all day stays free of them.
#pragma once

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "descriptors.hpp"
#include "pool_memory.hpp"

namespace muxserve::memory {

// A pool's descriptor cannot be had; what() says why.
class ExportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The memory of the pools, by pool and rank.
using ExportedPools = std::vector<std::vector<const PoolMemory*>>;

class ExportServer {
 public:
  // Where it listens, for a manager that listens on `manager_socket`.
  static std::string path_for(const std::string& manager_socket) { return manager_socket + ".pools"; }

  // Listens on `path`, a SEQPACKET socket that only this user can open, until the object is gone: a client sends
  // "<pool> <rank> <chunk>" and gets "OK" with the descriptor, or words. `pools` outlive it. Throws ExportError.
  ExportServer(const std::string& path, ExportedPools pools);
  ~ExportServer();
  ExportServer(const ExportServer&) = delete;
  ExportServer& operator=(const ExportServer&) = delete;

 private:
  void serve();
  void answer(int client) const;

  std::string path_;
  ExportedPools pools_;
  Descriptor listener_;
  Descriptor stop_;  // an eventfd
  std::thread thread_;
};

// Asks the server on `path`. Throws ExportError with its words.
Descriptor ask_for_descriptor(const std::string& path, std::size_t pool, std::size_t rank, std::size_t chunk = 0);

}  // namespace muxserve::memory
