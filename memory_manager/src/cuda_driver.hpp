// The CUDA driver, loaded when it is needed: one build serves machines with and without a GPU.
//
// The few types and calls that are used are declared here, as the driver's binary interface has had them since CUDA 11;
// nothing of a toolkit is needed to build. MUXSERVE_CUDA_DRIVER names another library than libcuda.so.1, for tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace muxserve::cuda {

using Result = int;
using Device = int;
using Context = void*;
using DevicePointer = unsigned long long;
using AllocationHandle = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotInitialized = 3;
constexpr Result kInvalidContext = 201;

struct Uuid {
  std::array<unsigned char, 16> bytes;
};

struct IpcHandle {
  std::array<unsigned char, 64> bytes;
};

struct Location {
  int type = 1;  // a device
  int id = 0;
};

struct AllocationProperties {
  int type = 1;          // pinned to its device
  int handle_types = 0;  // kFileDescriptor if it is to be exported
  Location location;
  void* windows_metadata = nullptr;
  unsigned char compression = 0;
  unsigned char rdma = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
static_assert(sizeof(AllocationProperties) == 32);

constexpr int kRead = 1;
constexpr int kReadAndWrite = 3;

struct Access {
  Location location;
  int flags = kReadAndWrite;
};
static_assert(sizeof(Access) == 12);

constexpr int kFileDescriptor = 1;
constexpr int kAttributeVirtualMemory = 102;
constexpr int kAttributeFileDescriptors = 103;

// A driver call failed. what() says which, why, and what to do.
class DriverError : public std::runtime_error {
 public:
  DriverError(Result code, const std::string& words) : std::runtime_error(words), code_(code) {}
  Result code() const { return code_; }

 private:
  Result code_;
};

// The driver's entry points, initialised. Kept for the life of the process.
class Driver {
 public:
  // The driver of this process, loaded the first time. Throws DriverError where there is none, or no device.
  static const Driver& get();

  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Throws DriverError unless the call succeeded; `doing` says in words what it was for.
  void check(Result result, const char* call, const std::string& doing) const;

  // The device of that UUID ("GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"). Throws DriverError if it is not visible.
  Device device(const std::string& uuid) const;
  bool attribute(int which, Device device) const;

  Result (*init)(unsigned) = nullptr;
  Result (*device_count)(int*) = nullptr;
  Result (*device_get)(Device*, int) = nullptr;
  Result (*device_uuid)(Uuid*, Device) = nullptr;
  Result (*device_attribute)(int*, int, Device) = nullptr;
  Result (*primary_retain)(Context*, Device) = nullptr;
  Result (*primary_release)(Device) = nullptr;
  Result (*context_current)(Context*) = nullptr;
  Result (*context_set)(Context) = nullptr;
  Result (*granularity)(std::size_t*, const AllocationProperties*, int) = nullptr;
  Result (*create)(AllocationHandle*, std::size_t, const AllocationProperties*, unsigned long long) = nullptr;
  Result (*release)(AllocationHandle) = nullptr;
  Result (*export_handle)(void*, AllocationHandle, int, unsigned long long) = nullptr;
  Result (*import_handle)(AllocationHandle*, void*, int) = nullptr;
  Result (*reserve)(DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long) = nullptr;
  Result (*unreserve)(DevicePointer, std::size_t) = nullptr;
  Result (*map)(DevicePointer, std::size_t, std::size_t, AllocationHandle, unsigned long long) = nullptr;
  Result (*unmap)(DevicePointer, std::size_t) = nullptr;
  Result (*set_access)(DevicePointer, std::size_t, const Access*, std::size_t) = nullptr;
  Result (*alloc)(DevicePointer*, std::size_t) = nullptr;
  Result (*free)(DevicePointer) = nullptr;
  Result (*ipc_get)(IpcHandle*, DevicePointer) = nullptr;
  Result (*ipc_open)(DevicePointer*, IpcHandle, unsigned) = nullptr;
  Result (*ipc_close)(DevicePointer) = nullptr;

 private:
  Driver();
  template <class F>
  void resolve(F& function, const char* name);

  void* library_ = nullptr;
  Result (*error_name_)(Result, const char**) = nullptr;
  Result (*error_string_)(Result, const char**) = nullptr;
};

// "GPU-..." as nvidia-smi and NVML print it.
std::string uuid_text(const Uuid& uuid);

// A device's primary context, which all CUDA code of a process shares by default, current on this thread as long as
// this object lives. Where a context is current already, that one stays.
class PrimaryContext {
 public:
  PrimaryContext(const Driver& driver, Device device);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

 private:
  const Driver& driver_;
  Device device_;
  bool retained_ = false;
};

}  // namespace muxserve::cuda
