#include "cuda_memory.hpp"

#include <fcntl.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
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

Descriptor VmmPoolMemory::descriptor(std::size_t) const {
  return Descriptor(descriptor_ ? fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0) : -1);
}

std::string VmmPoolMemory::handle() const { return "cuda-vmm:" + uuid_ + ":" + std::to_string(bytes_) + ":" + id_; }

void VmmPoolMemory::destroy() {
  store_.forget(name_ + " " + std::to_string(bytes_) + " " + id_);
  if (allocation_) driver_.release(*allocation_);
  allocation_.reset();
  descriptor_.reset();
}

ChunkedVmmPoolMemory::ChunkedVmmPoolMemory(const Driver& driver, const std::string& uuid, std::size_t bytes,
                                           std::size_t chunk_bytes, std::string name, FdStore& store,
                                           const std::string& segment)
    : driver_(driver),
      uuid_(uuid),
      bytes_(bytes),
      chunk_bytes_(chunk_bytes),
      name_(std::move(name)),
      store_(store),
      numbers_(segment, (bytes + chunk_bytes - 1) / chunk_bytes * sizeof(std::uint32_t), PosixSegment::Use::kMapped),
      chunks_((bytes + chunk_bytes - 1) / chunk_bytes) {
  // Clients that have chunks of an earlier manager let go of them: their numbers are not used again.
  auto* numbers = static_cast<std::atomic<std::uint32_t>*>(numbers_.data());
  for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    last_ = std::max(last_, numbers[chunk].load());
    show(chunk, 0);
  }
}

std::string ChunkedVmmPoolMemory::handle() const {
  return "cuda-vmm-chunks:" + uuid_ + ":" + std::to_string(bytes_) + ":" + std::to_string(chunk_bytes_) + ":" +
         numbers_.name();
}

void ChunkedVmmPoolMemory::show(std::size_t chunk, std::uint32_t number) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "the numbers are shared between processes");
  static_cast<std::atomic<std::uint32_t>*>(numbers_.data())[chunk].store(number, std::memory_order_release);
}

Descriptor ChunkedVmmPoolMemory::descriptor(std::size_t chunk) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (chunk >= chunks_.size() || !chunks_[chunk]) return {};
  return chunks_[chunk]->descriptor();
}

void ChunkedVmmPoolMemory::give_back(std::size_t offset, std::size_t) noexcept {
  const std::size_t chunk = offset / chunk_bytes_;
  const std::lock_guard<std::mutex> lock(mutex_);
  show(chunk, 0);
  if (chunks_[chunk]) chunks_[chunk]->destroy();
  chunks_[chunk].reset();
}

void ChunkedVmmPoolMemory::take_again(std::size_t offset, std::size_t bytes) {
  const std::size_t chunk = offset / chunk_bytes_;
  auto made = std::make_unique<VmmPoolMemory>(driver_, uuid_, bytes, name_ + "." + std::to_string(chunk), store_);
  const std::lock_guard<std::mutex> lock(mutex_);
  chunks_[chunk] = std::move(made);
  show(chunk, ++last_);
}

void ChunkedVmmPoolMemory::destroy() {
  for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) give_back(chunk * chunk_bytes_, 0);
  numbers_.unlink();
}

std::unique_ptr<ChunkedVmmPoolMemory> chunked_cuda_pool(const std::string& uuid, std::size_t bytes,
                                                        std::size_t chunk_bytes, const std::string& name,
                                                        FdStore& store, const std::string& segment) {
  const Driver& driver = Driver::get();
  if (!exports_memory(driver, driver.device(uuid)))
    throw DriverError(-1, "the GPU cannot export memory as a file descriptor, so that a pool cannot be in chunks");
  const std::size_t unit = rounded(driver, properties(driver.device(uuid)), 1);
  if (chunk_bytes % unit != 0)
    throw DriverError(-1, "chunks of " + mebibytes(chunk_bytes) + " are no multiple of what the driver maps");
  // The last chunk ends where the driver can cut memory.
  bytes = (bytes + unit - 1) / unit * unit;
  return std::make_unique<ChunkedVmmPoolMemory>(driver, uuid, bytes, chunk_bytes, name, store, segment);
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
