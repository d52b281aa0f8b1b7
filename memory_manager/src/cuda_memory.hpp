// Pools in GPU memory that other processes can map.
//
// By virtual memory management (VMM) where the GPU allows it: physical memory is exported as a file descriptor and
// lives as long as anybody has the descriptor or a mapping. Descriptors are kept outside of the manager (FdStore), so
// that a restarted manager takes the very same memory up again, and an engine in the middle of a step does no harm.
// Else by legacy CUDA IPC: that memory dies with the manager, and engines map another one from the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda_driver.hpp"
#include "descriptors.hpp"
#include "fd_store.hpp"
#include "pool_memory.hpp"
#include "posix_memory.hpp"

namespace muxserve::memory {

enum class PoolIpc { kAuto, kVmm, kLegacy };

// "auto", "vmm" or "legacy". Nothing for another word.
std::optional<PoolIpc> pool_ipc(const std::string& word);

class VmmPoolMemory final : public PoolMemory {
 public:
  // Takes up the memory that `store` keeps under `name` if it has the right size, else allocates. Throws
  // cuda::DriverError; nothing is left behind then.
  VmmPoolMemory(const cuda::Driver& driver, const std::string& uuid, std::size_t bytes, std::string name,
                FdStore& store);
  ~VmmPoolMemory() override;

  // "cuda-vmm:<uuid>:<bytes>:<id>": bytes as mapped, a multiple of the granularity; the id tells allocations apart.
  std::string handle() const override;
  Descriptor descriptor(std::size_t chunk = 0) const override;
  void give_back(std::size_t, std::size_t) noexcept override {}
  void take_again(std::size_t, std::size_t) override {}
  void destroy() override;

 private:
  const cuda::Driver& driver_;
  std::string uuid_;
  std::size_t bytes_;
  std::string name_;
  std::string id_;
  FdStore& store_;
  cuda::Device device_;
  std::optional<cuda::PrimaryContext> context_;
  std::optional<cuda::AllocationHandle> allocation_;
  Descriptor descriptor_;
};

// The same in chunks: each is an allocation of its own, which comes and goes. What a client has to map stands in a
// segment of shared memory: by chunk a number that no other allocation of the pool had, 0 while it has no memory.
class ChunkedVmmPoolMemory final : public PoolMemory {
 public:
  // `name` as of VmmPoolMemory, of each chunk with its number; `segment` is what the numbers lie in. Chunks have
  // `chunk_bytes`, a multiple of the driver's granularity, the last one perhaps fewer. None has memory at first. Throws
  // MemoryError.
  ChunkedVmmPoolMemory(const cuda::Driver& driver, const std::string& uuid, std::size_t bytes, std::size_t chunk_bytes,
                       std::string name, FdStore& store, const std::string& segment);

  // "cuda-vmm-chunks:<uuid>:<bytes>:<bytes of a chunk>:<segment>".
  std::string handle() const override;
  Descriptor descriptor(std::size_t chunk) const override;
  void give_back(std::size_t offset, std::size_t bytes) noexcept override;
  void take_again(std::size_t offset, std::size_t bytes) override;
  void destroy() override;

  const std::string& segment() const { return numbers_.name(); }

 private:
  void show(std::size_t chunk, std::uint32_t number);

  const cuda::Driver& driver_;
  std::string uuid_;
  std::size_t bytes_;
  std::size_t chunk_bytes_;
  std::string name_;
  FdStore& store_;
  PosixSegment numbers_;
  std::uint32_t last_ = 0;
  mutable std::mutex mutex_;  // the export server reads `chunks_` from a thread of its own
  std::vector<std::unique_ptr<VmmPoolMemory>> chunks_;
};

// Whether the GPU can export memory as a file descriptor.
bool exports_memory(const cuda::Driver& driver, cuda::Device device);

class LegacyPoolMemory final : public PoolMemory {
 public:
  // Throws cuda::DriverError; nothing is left behind then.
  LegacyPoolMemory(const cuda::Driver& driver, const std::string& uuid, std::size_t bytes);
  ~LegacyPoolMemory() override { destroy(); }

  // "cuda-ipc:<uuid>:<bytes>:<128 hexadecimal digits of the handle>".
  std::string handle() const override;
  void give_back(std::size_t, std::size_t) noexcept override {}
  void take_again(std::size_t, std::size_t) override {}
  void destroy() override;

 private:
  const cuda::Driver& driver_;
  std::string uuid_;
  std::size_t bytes_;
  cuda::PrimaryContext context_;
  cuda::DevicePointer pointer_ = 0;
  cuda::IpcHandle handle_{};
};

// A pool on the GPU of that UUID by `ipc`; `note` says which way was taken, and why not the other. Throws
// cuda::DriverError.
std::unique_ptr<PoolMemory> cuda_pool(const std::string& uuid, std::size_t bytes, const std::string& name, PoolIpc ipc,
                                      FdStore& store, std::string& note);

// A pool in chunks. Throws cuda::DriverError where the GPU cannot export memory, or MemoryError.
std::unique_ptr<ChunkedVmmPoolMemory> chunked_cuda_pool(const std::string& uuid, std::size_t bytes,
                                                        std::size_t chunk_bytes, const std::string& name,
                                                        FdStore& store, const std::string& segment);

}  // namespace muxserve::memory
