// Pools in GPU memory that other processes can map.
//
// By virtual memory management (VMM) where the GPU allows it: physical memory is exported as a file descriptor and
// lives as long as anybody has the descriptor or a mapping. Descriptors are kept outside of the manager (FdStore), so
// that a restarted manager takes the very same memory up again, and an engine in the middle of a step does no harm.
// Else by legacy CUDA IPC: that memory dies with the manager, and engines map another one from the next.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "cuda_driver.hpp"
#include "descriptors.hpp"
#include "fd_store.hpp"
#include "pool_memory.hpp"

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
  int descriptor() const override { return descriptor_.get(); }
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

}  // namespace muxserve::memory
