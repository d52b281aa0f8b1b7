// A CUDA driver without a GPU, for tests: just the calls that the memory manager and its client make. Device memory is
// memory of the machine, shared between processes for real. Set by environment variables, read at every call:
//
//   FAKE_CUDA_DEVICES         how many GPUs there are (1)
//   FAKE_CUDA_MEMORY          bytes that may be allocated in this process (1 GiB)
//   FAKE_CUDA_NO_VMM          memory cannot be exported as a file descriptor
//   FAKE_CUDA_NO_READ_ONLY    memory cannot be mapped for reading only
//   FAKE_CUDA_NEEDS_CONTEXT   virtual memory management needs a current context
//   FAKE_CUDA_FAIL            NAME=CODE or NAME@N=CODE: this call fails, or only the N-th call of that name from now on
//   FAKE_CUDA_LOG             file to which every call is appended, with what it answered
//
// fakeCudaLive() counts what has been made and not given back.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

namespace {

using Result = int;

constexpr std::size_t kGranularity = 2u << 20;
constexpr Result kInvalidValue = 1;

struct Allocation {
  int fd;
  std::size_t bytes;
  int users;  // handles and mappings
};

std::mutex mutex;
std::map<unsigned long long, Allocation> allocations;    // by handle
std::map<unsigned long long, std::size_t> reservations;  // by address
std::map<unsigned long long, std::size_t> mappings;      // by address
struct Legacy {
  std::size_t bytes;
  unsigned long long handle;  // 0: of another process
};
std::map<unsigned long long, Legacy> legacy;  // by address: allocated or opened
std::map<std::string, int> calls;
std::string planned;
int contexts = 0;
std::size_t allocated = 0;
unsigned long long next_handle = 1;
thread_local void* current = nullptr;

// Whether [address, address + bytes) is in one reservation; and whether something in it is mapped.
bool reserved(unsigned long long address, std::size_t bytes) {
  auto after = reservations.upper_bound(address);
  if (after == reservations.begin()) return false;
  const auto& found = *--after;
  return address + bytes <= found.first + found.second;
}
bool in_use(unsigned long long address, std::size_t bytes) {
  const auto next = mappings.lower_bound(address);
  if (next != mappings.end() && next->first < address + bytes) return true;
  return next != mappings.begin() && std::prev(next)->first + std::prev(next)->second > address;
}

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::size_t number(const char* name, std::size_t otherwise) {
  const char* value = setting(name);
  return *value == '\0' ? otherwise : std::strtoull(value, nullptr, 10);
}

// The planned failure of this call, or 0. Counts anew whenever the plan changes.
Result failure(const std::string& name) {
  const std::string plan = setting("FAKE_CUDA_FAIL");
  if (plan != planned) {
    planned = plan;
    calls.clear();
  }
  const int nth = ++calls[name];
  const std::size_t equals = plan.find('=');
  if (equals == std::string::npos) return 0;
  const std::string what = plan.substr(0, equals);
  const std::size_t at = what.find('@');
  if (what.substr(0, at) != name) return 0;
  if (at != std::string::npos && std::atoi(what.c_str() + at + 1) != nth) return 0;
  return std::atoi(plan.c_str() + equals + 1);
}

Result said(const char* name, Result result) {
  const char* log = setting("FAKE_CUDA_LOG");
  if (*log != '\0') {
    const int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const std::string line = std::string(name) + " " + std::to_string(result) + "\n";
    if (fd >= 0 && write(fd, line.data(), line.size()) < 0) result = 999;
    if (fd >= 0) close(fd);
  }
  return result;
}

bool lacks_context() { return *setting("FAKE_CUDA_NEEDS_CONTEXT") != '\0' && current == nullptr; }

// Memory that another process can open too.
int new_memory(std::size_t bytes) {
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

template <class F>
Result call(const char* name, F work) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Result planned_failure = failure(name);
  return said(name, planned_failure != 0 ? planned_failure : work());
}

struct Location {
  int type;
  int id;
};

struct Access {
  Location location;
  int flags;
};

struct IpcHandle {
  unsigned char bytes[64];
};

}  // namespace

extern "C" {

int fakeCudaLive() {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(allocations.size() + reservations.size() + mappings.size() + legacy.size()) + contexts;
}

Result cuGetErrorName(Result result, const char** text) {
  static thread_local std::string words;
  words = "CUDA_ERROR_NUMBER_" + std::to_string(result);
  *text = words.c_str();
  return 0;
}

Result cuGetErrorString(Result, const char** text) {
  *text = "as the test asked for";
  return 0;
}

// The process that has called cuInit: a child of it has not.
static pid_t initialised = 0;

Result cuInit(unsigned) {
  return call("cuInit", [] {
    initialised = getpid();
    return number("FAKE_CUDA_DEVICES", 1) == 0 ? 100 : 0;
  });
}

Result cuDeviceGetCount(int* count) {
  if (initialised != getpid()) return 3;
  return call("cuDeviceGetCount", [&] {
    *count = static_cast<int>(number("FAKE_CUDA_DEVICES", 1));
    return 0;
  });
}

Result cuDeviceGet(int* device, int index) {
  return call("cuDeviceGet", [&] {
    *device = index;
    return 0;
  });
}

// GPU-00010203-0405-0607-0809-0a0b0c0d0eNN, NN the device's number.
Result cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  return call("cuDeviceGetUuid", [&] {
    for (int i = 0; i < 15; ++i) uuid[i] = static_cast<unsigned char>(i);
    uuid[15] = static_cast<unsigned char>(device);
    return 0;
  });
}

Result cuDeviceGetAttribute(int* value, int, int) {
  return call("cuDeviceGetAttribute", [&] {
    *value = *setting("FAKE_CUDA_NO_VMM") == '\0' ? 1 : 0;
    return 0;
  });
}

Result cuDevicePrimaryCtxRetain(void** context, int device) {
  return call("cuDevicePrimaryCtxRetain", [&] {
    ++contexts;
    *context = reinterpret_cast<void*>(static_cast<std::intptr_t>(device) + 1);
    return 0;
  });
}

Result cuDevicePrimaryCtxRelease_v2(int) {
  return call("cuDevicePrimaryCtxRelease", [] {
    --contexts;
    return 0;
  });
}

Result cuCtxGetCurrent(void** context) {
  return call("cuCtxGetCurrent", [&] {
    *context = current;
    return 0;
  });
}

Result cuCtxSetCurrent(void* context) {
  return call("cuCtxSetCurrent", [&] {
    current = context;
    return 0;
  });
}

Result cuMemGetAllocationGranularity(std::size_t* granularity, const void*, int) {
  return call("cuMemGetAllocationGranularity", [&] {
    *granularity = kGranularity;
    return 0;
  });
}

Result cuMemCreate(unsigned long long* handle, std::size_t bytes, const void*, unsigned long long) {
  return call("cuMemCreate", [&] {
    if (lacks_context()) return 201;
    if (bytes % kGranularity != 0) return kInvalidValue;
    if (allocated + bytes > number("FAKE_CUDA_MEMORY", 1u << 30)) return 2;
    const int fd = new_memory(bytes);
    if (fd < 0) return 2;
    allocated += bytes;
    *handle = next_handle++;
    allocations[*handle] = {fd, bytes, 1};
    return 0;
  });
}

static void drop(unsigned long long handle) {
  Allocation& allocation = allocations.at(handle);
  if (--allocation.users > 0) return;
  close(allocation.fd);
  allocated -= allocation.bytes;
  allocations.erase(handle);
}

Result cuMemRelease(unsigned long long handle) {
  return call("cuMemRelease", [&] {
    if (allocations.count(handle) == 0) return kInvalidValue;
    drop(handle);
    return 0;
  });
}

Result cuMemExportToShareableHandle(void* out, unsigned long long handle, int type, unsigned long long) {
  return call("cuMemExportToShareableHandle", [&] {
    if (lacks_context()) return 201;
    if (*setting("FAKE_CUDA_NO_VMM") != '\0' || type != 1) return 801;
    const int fd = dup(allocations.at(handle).fd);
    if (fd < 0) return 2;
    std::memcpy(out, &fd, sizeof fd);
    return 0;
  });
}

Result cuMemImportFromShareableHandle(unsigned long long* handle, void* os_handle, int type) {
  return call("cuMemImportFromShareableHandle", [&] {
    if (lacks_context()) return 201;
    const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
    const off_t bytes = lseek(fd, 0, SEEK_END);
    if (type != 1 || bytes <= 0) return kInvalidValue;
    *handle = next_handle++;
    allocations[*handle] = {dup(fd), static_cast<std::size_t>(bytes), 1};
    allocated += static_cast<std::size_t>(bytes);
    return 0;
  });
}

Result cuMemAddressReserve(unsigned long long* address, std::size_t bytes, std::size_t, unsigned long long,
                           unsigned long long) {
  return call("cuMemAddressReserve", [&] {
    void* found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return 2;
    *address = reinterpret_cast<unsigned long long>(found);
    reservations[*address] = bytes;
    return 0;
  });
}

Result cuMemAddressFree(unsigned long long address, std::size_t bytes) {
  return call("cuMemAddressFree", [&] {
    if (reservations.count(address) == 0 || in_use(address, bytes)) return kInvalidValue;
    munmap(reinterpret_cast<void*>(address), bytes);
    reservations.erase(address);
    return 0;
  });
}

Result cuMemMap(unsigned long long address, std::size_t bytes, std::size_t, unsigned long long handle,
                unsigned long long) {
  return call("cuMemMap", [&] {
    if (!reserved(address, bytes) || in_use(address, bytes) || allocations.count(handle) == 0) return kInvalidValue;
    if (allocations[handle].bytes < bytes || bytes % kGranularity != 0) return kInvalidValue;
    // Nobody may touch it before cuMemSetAccess.
    void* found =
        mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocations[handle].fd, 0);
    if (found == MAP_FAILED) return 2;
    mappings[address] = bytes;
    return 0;
  });
}

Result cuMemUnmap(unsigned long long address, std::size_t bytes) {
  return call("cuMemUnmap", [&] {
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second != bytes) return kInvalidValue;
    mappings.erase(found);
    mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
    return 0;
  });
}

Result cuMemSetAccess(unsigned long long address, std::size_t bytes, const Access* access, std::size_t) {
  return call("cuMemSetAccess", [&] {
    if (mappings.count(address) == 0) return kInvalidValue;
    const bool writes = access->flags == 3;
    if (!writes && *setting("FAKE_CUDA_NO_READ_ONLY") != '\0') return 801;
    const int allowed = writes ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect(reinterpret_cast<void*>(address), bytes, allowed) == 0 ? 0 : 999;
  });
}

Result cuMemAlloc_v2(unsigned long long* address, std::size_t bytes) {
  return call("cuMemAlloc", [&] {
    if (current == nullptr) return 201;
    if (allocated + bytes > number("FAKE_CUDA_MEMORY", 1u << 30)) return 2;
    const int fd = new_memory(bytes);
    if (fd < 0) return 2;
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    *address = reinterpret_cast<unsigned long long>(found);
    // The descriptor stays open for cuIpcOpenMemHandle, which opens it through /proc.
    legacy[*address] = {bytes, next_handle};
    allocations[next_handle++] = {fd, bytes, 1};
    allocated += bytes;
    return 0;
  });
}

Result cuMemFree_v2(unsigned long long address) {
  return call("cuMemFree", [&] {
    if (legacy.count(address) == 0) return kInvalidValue;
    const Legacy memory = legacy[address];
    munmap(reinterpret_cast<void*>(address), memory.bytes);
    legacy.erase(address);
    if (memory.handle != 0) drop(memory.handle);
    return 0;
  });
}

Result cuMemGetAddressRange_v2(unsigned long long* base, std::size_t* bytes, unsigned long long address) {
  return call("cuMemGetAddressRange", [&] {
    auto found = legacy.upper_bound(address);
    if (found == legacy.begin() || address >= (--found)->first + found->second.bytes) return kInvalidValue;
    *base = found->first;
    *bytes = found->second.bytes;
    return 0;
  });
}

Result cuIpcGetMemHandle(IpcHandle* handle, unsigned long long address) {
  return call("cuIpcGetMemHandle", [&] {
    if (legacy.count(address) == 0 || legacy[address].handle == 0) return kInvalidValue;
    std::memset(handle, 0, sizeof *handle);
    const Legacy memory = legacy[address];
    std::snprintf(reinterpret_cast<char*>(handle->bytes), sizeof handle->bytes, "/proc/%d/fd/%d %zu",
                  static_cast<int>(getpid()), allocations.at(memory.handle).fd, memory.bytes);
    return 0;
  });
}

Result cuIpcOpenMemHandle_v2(unsigned long long* address, IpcHandle handle, unsigned) {
  return call("cuIpcOpenMemHandle", [&] {
    char path[64] = {};
    std::size_t bytes = 0;
    if (std::sscanf(reinterpret_cast<const char*>(handle.bytes), "%63s %zu", path, &bytes) != 2) return kInvalidValue;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return 101;
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    *address = reinterpret_cast<unsigned long long>(found);
    legacy[*address] = {bytes, 0};
    return 0;
  });
}

Result cuIpcCloseMemHandle(unsigned long long address) {
  return call("cuIpcCloseMemHandle", [&] {
    if (legacy.count(address) == 0) return kInvalidValue;
    munmap(reinterpret_cast<void*>(address), legacy[address].bytes);
    legacy.erase(address);
    return 0;
  });
}

}  // extern "C"
