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

  cuda::DevicePointer address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  const std::string& handle() const { return handle_; }
  const std::string& device_uuid() const { return uuid_; }
  bool read_only() const { return read_only_; }

 private:
  void map_vmm(const Descriptor& descriptor, bool read_only);
  void map_legacy(const std::string& digits);

  const cuda::Driver& driver_;
  std::string handle_;
  std::string kind_;
  std::string uuid_;
  std::size_t bytes_ = 0;
  bool read_only_ = false;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::DevicePointer address_ = 0;
};

}  // namespace muxserve::memory
