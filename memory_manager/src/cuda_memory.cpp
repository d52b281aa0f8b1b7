#include "cuda_memory.hpp"

#include <sys/random.h>

#include <cstdio>
#include <utility>

#include "text.hpp"

namespace muxserve::memory {
namespace {

using cuda::AllocationHandle;
using cuda::AllocationProperties;
using cuda::Driver;
using cuda::DriverError;
using cuda::Result;

std::string hexadecimal(const unsigned char* bytes, std::size_t size) {
  std::string text;
  char two[3];
  for (std::size_t i = 0; i < size; ++i) {
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(bytes[i]));
    text += two;
  }
  return text;
}

std::string fresh_id() {
  unsigned char bytes[8] = {};
  if (getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes))
    throw DriverError(-1, "no random numbers");
  return hexadecimal(bytes, sizeof bytes);
}

AllocationProperties properties(cuda::Device device) {
  AllocationProperties wanted;
  wanted.handle_types = cuda::kFileDescriptor;
  wanted.location.id = device;
  return wanted;
}

// `bytes` rounded up to what can be mapped.
std::size_t rounded(const Driver& driver, const AllocationProperties& wanted, std::size_t bytes) {
  std::size_t unit = 0;
  driver.check(driver.granularity(&unit, &wanted, 0), "cuMemGetAllocationGranularity", "sizing the pool");
  if (unit == 0) throw DriverError(-1, "sizing the pool failed: the driver reports a granularity of 0");
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::optional<PoolIpc> pool_ipc(const std::string& word) {
  if (word == "auto") return PoolIpc::kAuto;
  if (word == "vmm") return PoolIpc::kVmm;
  if (word == "legacy") return PoolIpc::kLegacy;
  return std::nullopt;
}

VmmPoolMemory::VmmPoolMemory(const Driver& driver, const std::string& uuid, std::size_t bytes, std::string name,
                             FdStore& store)
    : driver_(driver), uuid_(uuid), bytes_(bytes), name_(std::move(name)), store_(store), device_(driver.device(uuid)) {
  const std::string doing = "allocating a pool of " + mebibytes(bytes) + " on " + uuid;
  const AllocationProperties wanted = properties(device_);
  bytes_ = rounded(driver, wanted, bytes);
  // Physical memory needs no context; a context would cost some hundred MiB. A driver that wants one says so.
  const auto with_context_if_needed = [&](auto call) {
    Result result = call();
    if (result == cuda::kInvalidContext || result == cuda::kNotInitialized) {
      context_.emplace(driver, device_);
      result = call();
    }
    return result;
  };
  AllocationHandle allocation = 0;
  const std::string size = " " + std::to_string(bytes_) + " ";
  auto [id, kept] = store.take(name_ + size);
  if (kept) {
    const auto import = [&] {
      return driver.import_handle(&allocation, reinterpret_cast<void*>(static_cast<std::intptr_t>(kept.get())),
                                  cuda::kFileDescriptor);
    };
    if (with_context_if_needed(import) == cuda::kSuccess) {
      allocation_ = allocation;
      descriptor_ = std::move(kept);
      id_ = std::move(id);
      return;
    }
    store.forget(name_ + size + id);
  }
  driver.check(with_context_if_needed([&] { return driver.create(&allocation, bytes_, &wanted, 0); }), "cuMemCreate",
               doing);
  int fd = -1;
  const Result exported =
      with_context_if_needed([&] { return driver.export_handle(&fd, allocation, cuda::kFileDescriptor, 0); });
  if (exported != cuda::kSuccess) {
    driver.release(allocation);
    driver.check(exported, "cuMemExportToShareableHandle", "exporting the pool");
  }
  allocation_ = allocation;
  descriptor_ = Descriptor(fd);
  id_ = fresh_id();
  store.keep(name_ + size + id_, fd);
}

bool exports_memory(const Driver& driver, cuda::Device device) {
  return driver.attribute(cuda::kAttributeVirtualMemory, device) &&
         driver.attribute(cuda::kAttributeFileDescriptors, device);
}

VmmPoolMemory::~VmmPoolMemory() {
  if (allocation_) driver_.release(*allocation_);
}

std::string VmmPoolMemory::handle() const { return "cuda-vmm:" + uuid_ + ":" + std::to_string(bytes_) + ":" + id_; }

void VmmPoolMemory::destroy() {
  store_.forget(name_ + " " + std::to_string(bytes_) + " " + id_);
  if (allocation_) driver_.release(*allocation_);
  allocation_.reset();
  descriptor_.reset();
}

LegacyPoolMemory::LegacyPoolMemory(const Driver& driver, const std::string& uuid, std::size_t bytes)
    : driver_(driver), uuid_(uuid), bytes_(bytes), context_(driver, driver.device(uuid)) {
  driver.check(driver.alloc(&pointer_, bytes), "cuMemAlloc",
               "allocating a pool of " + mebibytes(bytes) + " on " + uuid);
  const Result exported = driver.ipc_get(&handle_, pointer_);
  if (exported != cuda::kSuccess) {
    driver.free(pointer_);
    driver.check(exported, "cuIpcGetMemHandle", "exporting the pool");
  }
}

std::string LegacyPoolMemory::handle() const {
  return "cuda-ipc:" + uuid_ + ":" + std::to_string(bytes_) + ":" +
         hexadecimal(handle_.bytes.data(), handle_.bytes.size());
}

void LegacyPoolMemory::destroy() {
  if (pointer_ != 0) driver_.free(pointer_);
  pointer_ = 0;
}

std::unique_ptr<PoolMemory> cuda_pool(const std::string& uuid, std::size_t bytes, const std::string& name, PoolIpc ipc,
                                      FdStore& store, std::string& note) {
  const Driver& driver = Driver::get();
  const cuda::Device device = driver.device(uuid);
  std::string why = "ipc: legacy was asked for";
  if (ipc != PoolIpc::kLegacy) {
    if (exports_memory(driver, device) || ipc == PoolIpc::kVmm) {
      try {
        auto pool = std::make_unique<VmmPoolMemory>(driver, uuid, bytes, name, store);
        note = "pool " + name + " on " + uuid + ": by virtual memory management";
        return pool;
      } catch (const DriverError& error) {
        // Where memory is short, the other way has no more of it.
        if (ipc == PoolIpc::kVmm || error.code() == cuda::kOutOfMemory) throw;
        why = error.what();
      }
    } else {
      why = "the GPU cannot export memory as a file descriptor";
    }
  }
  auto pool = std::make_unique<LegacyPoolMemory>(driver, uuid, bytes);
  note =
      "pool " + name + " on " + uuid + ": by legacy CUDA IPC (" + why + "); it is allocated anew if the manager dies";
  return pool;
}

}  // namespace muxserve::memory
