#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace muxserve::cuda {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

// What to do about the failures that a user can do something about.
const char* advice(Result code) {
  switch (code) {
    case kOutOfMemory:
      return "; the GPU has too little free memory: see what else runs on it (nvidia-smi), or lower cluster.gpu_memory";
    case 46:  // CUDA_ERROR_DEVICE_UNAVAILABLE
      return "; the GPU is in exclusive mode or taken: other processes must leave it";
    case 100:  // CUDA_ERROR_NO_DEVICE
      return "; no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES";
    case 205:  // CUDA_ERROR_MAP_FAILED
    case 800:  // CUDA_ERROR_NOT_PERMITTED
    case 801:  // CUDA_ERROR_NOT_SUPPORTED
      return "; this GPU, driver or container does not allow it";
    case 214:  // CUDA_ERROR_ECC_UNCORRECTABLE
      return "; the GPU has reported a memory error that it cannot correct: it must be reset or replaced";
    case 719:  // CUDA_ERROR_LAUNCH_FAILED
    case 999:  // CUDA_ERROR_UNKNOWN
      return "; the GPU may be lost: look for Xid messages in the kernel log (dmesg)";
    case 803:  // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    case 804:  // CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
      return "; the driver's library and its kernel module are of different versions: restart, or reinstall the driver";
    case 805:  // CUDA_ERROR_MPS_CONNECTION_FAILED
    case 806:  // CUDA_ERROR_MPS_RPC_FAILURE
    case 807:  // CUDA_ERROR_MPS_SERVER_NOT_READY
      return "; the MPS server does not answer: it is started again with the fleet";
    case 808:  // CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
    case 809:  // CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
      return "; the MPS server takes no more clients: serve fewer models on this GPU";
    default:
      return "";
  }
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver;
  return driver;
}

Driver::Driver() {
  const char* other = std::getenv("MUXSERVE_CUDA_DRIVER");
  const std::string path = other != nullptr && *other != '\0' ? other : kLibrary;
  library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    const char* why = dlerror();
    throw DriverError(-1, "there is no CUDA driver: " + std::string(why == nullptr ? path : why) +
                              "; install the NVIDIA driver, or serve on CPU");
  }
  try {
    resolve(error_name_, "cuGetErrorName");
    resolve(error_string_, "cuGetErrorString");
    resolve(init, "cuInit");
    resolve(device_count, "cuDeviceGetCount");
    resolve(device_get, "cuDeviceGet");
    resolve(device_uuid, "cuDeviceGetUuid_v2");
    resolve(device_attribute, "cuDeviceGetAttribute");
    resolve(primary_retain, "cuDevicePrimaryCtxRetain");
    resolve(primary_release, "cuDevicePrimaryCtxRelease_v2");
    resolve(context_current, "cuCtxGetCurrent");
    resolve(context_set, "cuCtxSetCurrent");
    resolve(granularity, "cuMemGetAllocationGranularity");
    resolve(create, "cuMemCreate");
    resolve(release, "cuMemRelease");
    resolve(export_handle, "cuMemExportToShareableHandle");
    resolve(import_handle, "cuMemImportFromShareableHandle");
    resolve(reserve, "cuMemAddressReserve");
    resolve(unreserve, "cuMemAddressFree");
    resolve(map, "cuMemMap");
    resolve(unmap, "cuMemUnmap");
    resolve(set_access, "cuMemSetAccess");
    resolve(alloc, "cuMemAlloc_v2");
    resolve(free, "cuMemFree_v2");
    resolve(ipc_get, "cuIpcGetMemHandle");
    resolve(ipc_open, "cuIpcOpenMemHandle_v2");
    resolve(ipc_close, "cuIpcCloseMemHandle");
    check(init(0), "cuInit", "starting the CUDA driver");
  } catch (...) {
    dlclose(library_);
    throw;
  }
}

Driver::~Driver() = default;  // the library stays: it has threads of its own

template <class F>
void Driver::resolve(F& function, const char* name) {
  void* found = dlsym(library_, name);
  if (found == nullptr)
    throw DriverError(-1,
                      std::string("the CUDA driver has no ") + name + ": it is too old, install version 580 or newer");
  function = reinterpret_cast<F>(found);
}

void Driver::check(Result result, const char* call, const std::string& doing) const {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name_ == nullptr || error_name_(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (error_string_ == nullptr || error_string_(result, &text) != kSuccess || text == nullptr) text = "no description";
  throw DriverError(result, doing + " failed: " + call + " answered " + name + " (" + std::to_string(result) + ", " +
                                text + ")" + advice(result));
}

Device Driver::device(const std::string& uuid) const {
  int count = 0;
  check(device_count(&count), "cuDeviceGetCount", "looking for GPU " + uuid);
  std::string seen;
  for (int i = 0; i < count; ++i) {
    Device device = 0;
    Uuid its{};
    check(device_get(&device, i), "cuDeviceGet", "looking for GPU " + uuid);
    check(device_uuid(&its, device), "cuDeviceGetUuid", "looking for GPU " + uuid);
    if (uuid_text(its) == uuid) return device;
    seen += (seen.empty() ? "" : ", ") + uuid_text(its);
  }
  throw DriverError(100, "there is no GPU " + uuid + " among those visible (" + (seen.empty() ? "none" : seen) +
                             "): check CUDA_VISIBLE_DEVICES");
}

bool Driver::attribute(int which, Device device) const {
  int value = 0;
  return device_attribute(&value, which, device) == kSuccess && value != 0;
}

std::string uuid_text(const Uuid& uuid) {
  std::string text = "GPU-";
  char two[3];
  for (std::size_t i = 0; i < uuid.bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(uuid.bytes[i]));
    text += two;
  }
  return text;
}

PrimaryContext::PrimaryContext(const Driver& driver, Device device) : driver_(driver), device_(device) {
  Context context = nullptr;
  driver.check(driver.context_current(&context), "cuCtxGetCurrent", "looking for a CUDA context");
  if (context != nullptr) return;
  driver.check(driver.primary_retain(&context, device), "cuDevicePrimaryCtxRetain", "making a CUDA context");
  retained_ = true;
  const Result set = driver.context_set(context);
  if (set != kSuccess) {
    driver.primary_release(device);
    driver.check(set, "cuCtxSetCurrent", "making a CUDA context");
  }
}

PrimaryContext::~PrimaryContext() {
  if (!retained_) return;
  driver_.context_set(nullptr);
  driver_.primary_release(device_);
}

}  // namespace muxserve::cuda
