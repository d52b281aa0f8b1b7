// A pool in GPU memory that comes and goes in chunks, as a client sees it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_driver.hpp"
#include "mapping.hpp"

namespace muxserve::memory {

// The addresses of the whole pool, which stay, and the chunks behind them that have memory. Who is to compute on the
// pool calls sync() first: then all chunks are mapped that had memory before the call. Memory that the manager gives
// back is let go of by a thread, so that a process which computes nothing does not keep it. The device's primary
// context is used, as by torch, and kept as long as the mapping.
class ChunkMapping {
 public:
  // `handle` is a pool's, of the kind "cuda-vmm-chunks"; descriptors of its chunks on that rank come from the manager
  // that listens on `manager_socket`. Throws cuda::DriverError or MappingError; nothing is left behind then.
  ChunkMapping(const std::string& handle, const std::string& manager_socket, std::size_t pool, std::size_t rank);
  ~ChunkMapping();
  ChunkMapping(const ChunkMapping&) = delete;
  ChunkMapping& operator=(const ChunkMapping&) = delete;

  // Maps what has come, and lets go of what has gone. Throws cuda::DriverError, or ExportError if the manager is gone;
  // what was mapped before stays so.
  void sync();

  cuda::DevicePointer address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  const std::string& handle() const { return handle_; }
  const std::string& device_uuid() const { return uuid_; }
  // How many chunks are mapped.
  std::size_t mapped() const;

 private:
  std::uint32_t number(std::size_t chunk) const;
  void enter() const;
  void let_go();
  void map(std::size_t chunk, std::uint32_t number);
  void unmap(std::size_t chunk);
  std::size_t bytes_of(std::size_t chunk) const;
  void watch();

  const cuda::Driver& driver_;
  std::string handle_;
  std::string uuid_;
  std::string manager_socket_;
  std::size_t pool_;
  std::size_t rank_;
  std::size_t bytes_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::unique_ptr<Mapping> numbers_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::DevicePointer address_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::uint32_t> mapped_;  // by chunk: the number of what is mapped, 0 if nothing is
  std::condition_variable over_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace muxserve::memory
