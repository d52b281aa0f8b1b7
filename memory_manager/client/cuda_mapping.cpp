#include "cuda_mapping.hpp"

#include <array>
#include <cstdint>
#include <sstream>
#include <utility>
#include <vector>

namespace muxserve::memory {
namespace {

using cuda::Driver;
using cuda::DriverError;

constexpr unsigned kLazyPeerAccess = 1;

std::vector<std::string> parts_of(const std::string& handle) {
  std::vector<std::string> parts;
  std::istringstream in(handle);
  for (std::string part; std::getline(in, part, ':');) parts.push_back(part);
  return parts;
}

// Undoes what was done so far unless everything was.
template <class F>
class Undo {
 public:
  explicit Undo(F undo) : undo_(std::move(undo)) {}
  ~Undo() {
    if (armed_) undo_();
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  void keep() { armed_ = false; }

 private:
  F undo_;
  bool armed_ = true;
};

}  // namespace

CudaMapping::CudaMapping(const std::string& handle, Descriptor descriptor, bool read_only)
    : driver_(Driver::get()), handle_(handle), for_reading_(read_only) {
  const std::vector<std::string> parts = parts_of(handle);
  if (parts.size() != 4 || (parts[0] != "cuda-vmm" && parts[0] != "cuda-ipc"))
    throw MappingError("this client cannot map pool memory of the kind \"" + handle + "\"");
  kind_ = parts[0];
  uuid_ = parts[1];
  bytes_ = static_cast<std::size_t>(std::stoull(parts[2]));
  device_ = driver_.device(uuid_);
  // Kept as long as the mapping; torch retains the same one.
  driver_.check(driver_.primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain", "making a CUDA context");
  Undo context([this] { driver_.primary_release(device_); });
  enter();
  if (kind_ == "cuda-vmm") {
    map_vmm(descriptor);
  } else {
    map_legacy(parts[3]);
  }
  mapped_ = true;
  context.keep();
}

// Have a context, if this thread has none.
void CudaMapping::enter() {
  cuda::Context current = nullptr;
  driver_.check(driver_.context_current(&current), "cuCtxGetCurrent", "looking for a CUDA context");
  if (current == nullptr) driver_.check(driver_.context_set(context_), "cuCtxSetCurrent", "making a CUDA context");
}

void CudaMapping::map_vmm(const Descriptor& descriptor) {
  const cuda::AllocationHandle allocation = imported(descriptor);
  // The mapping holds the memory; the handle is not needed beyond this call.
  const Undo handle([&] { driver_.release(allocation); });
  cuda::DevicePointer address = 0;
  driver_.check(driver_.reserve(&address, bytes_, 0, 0, 0), "cuMemAddressReserve", "mapping the pool on " + uuid_);
  Undo reserved([&] { driver_.unreserve(address, bytes_); });
  map_at(address, allocation);
  reserved.keep();
  address_ = address;
}

cuda::AllocationHandle CudaMapping::imported(const Descriptor& descriptor) const {
  cuda::AllocationHandle allocation = 0;
  void* os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor.get()));
  driver_.check(driver_.import_handle(&allocation, os_handle, cuda::kFileDescriptor), "cuMemImportFromShareableHandle",
                "mapping the pool on " + uuid_);
  return allocation;
}

void CudaMapping::map_at(cuda::DevicePointer address, cuda::AllocationHandle allocation) {
  const std::string doing = "mapping the pool on " + uuid_;
  driver_.check(driver_.map(address, bytes_, 0, allocation, 0), "cuMemMap", doing);
  Undo mapped([&] { driver_.unmap(address, bytes_); });
  cuda::Access access;
  access.location.id = device_;
  read_only_ = false;
  if (for_reading_) {
    access.flags = cuda::kRead;
    read_only_ = driver_.set_access(address, bytes_, &access, 1) == cuda::kSuccess;
  }
  if (!read_only_) {
    access.flags = cuda::kReadAndWrite;
    driver_.check(driver_.set_access(address, bytes_, &access, 1), "cuMemSetAccess", doing);
  }
  mapped.keep();
}

void CudaMapping::unmap() {
  if (kind_ != "cuda-vmm") throw MappingError("memory of the kind \"" + kind_ + "\" keeps no addresses of its own");
  if (!mapped_) return;
  enter();
  driver_.check(driver_.unmap(address_, bytes_), "cuMemUnmap", "letting go of memory on " + uuid_);
  mapped_ = false;
}

void CudaMapping::map_again(const std::string& handle, Descriptor descriptor) {
  const std::vector<std::string> parts = parts_of(handle);
  if (mapped_ || parts.size() != 4 || parts[0] != "cuda-vmm" || parts[1] != uuid_ || parts[2] != std::to_string(bytes_))
    throw MappingError("\"" + handle + "\" cannot take the place of \"" + handle_ + "\"");
  enter();
  const cuda::AllocationHandle allocation = imported(descriptor);
  const Undo imported([&] { driver_.release(allocation); });
  map_at(address_, allocation);
  handle_ = handle;
  mapped_ = true;
}

void CudaMapping::map_legacy(const std::string& digits) {
  cuda::IpcHandle handle{};
  if (digits.size() != 2 * handle.bytes.size())
    throw MappingError("the pool's CUDA IPC handle has " + std::to_string(digits.size()) + " digits, not " +
                       std::to_string(2 * handle.bytes.size()));
  for (std::size_t i = 0; i < handle.bytes.size(); ++i)
    handle.bytes[i] = static_cast<unsigned char>(std::stoul(digits.substr(2 * i, 2), nullptr, 16));
  driver_.check(driver_.ipc_open(&address_, handle, kLazyPeerAccess), "cuIpcOpenMemHandle",
                "mapping the pool on " + uuid_);
}

CudaMapping::~CudaMapping() {
  if (kind_ == "cuda-vmm") {
    if (mapped_) driver_.unmap(address_, bytes_);
    driver_.unreserve(address_, bytes_);
  } else {
    driver_.ipc_close(address_);
  }
  driver_.primary_release(device_);
}

}  // namespace muxserve::memory
