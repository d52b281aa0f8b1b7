// A pool in GPU memory as a client sees it.
#pragma once

#include <cstddef>
#include <string>

#include "cuda_driver.hpp"
#include "descriptors.hpp"
#include "mapping.hpp"

namespace muxserve::memory {

// One pool (or other memory that was exported) on one GPU, mapped into this process until the last user of the object
// is gone. The device's primary context is used, as by torch, and kept as long as the mapping.
class CudaMapping {
 public:
  // `handle` is a pool's; `descriptor` is its, for handles of the kind "cuda-vmm", and not needed after the call.
  // Memory of that kind is mapped for reading only if that is asked for and the driver can. Throws cuda::DriverError,
  // or MappingError for a handle that is not understood; nothing is left behind then.
  CudaMapping(const std::string& handle, Descriptor descriptor, bool read_only = false);
  ~CudaMapping();
  CudaMapping(const CudaMapping&) = delete;
  CudaMapping& operator=(const CudaMapping&) = delete;

  // Let go of the memory, of the kind "cuda-vmm", and keep its addresses: nobody else gets them here. Nothing is to
  // compute on it. Throws cuda::DriverError, or MappingError for memory of another kind.
  void unmap();
  // Map other memory of the same size, on the same GPU, where that of `unmap` was. Throws as the constructor; it is as
  // after `unmap` then.
  void map_again(const std::string& handle, Descriptor descriptor);

  cuda::DevicePointer address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  const std::string& handle() const { return handle_; }
  const std::string& device_uuid() const { return uuid_; }
  bool read_only() const { return read_only_; }
  bool mapped() const { return mapped_; }

 private:
  void enter();
  void map_vmm(const Descriptor& descriptor);
  cuda::AllocationHandle imported(const Descriptor& descriptor) const;
  void map_at(cuda::DevicePointer address, cuda::AllocationHandle allocation);
  void map_legacy(const std::string& digits);

  const cuda::Driver& driver_;
  std::string handle_;
  std::string kind_;
  std::string uuid_;
  std::size_t bytes_ = 0;
  // What was asked for, and what the driver does.
  bool for_reading_ = false;
  bool read_only_ = false;
  bool mapped_ = false;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::DevicePointer address_ = 0;
};

}  // namespace muxserve::memory
