// Stands in for libcuda.so.1: says when it is initialised (a line in $CUDA_STUB_LOG), and has no GPU. Linked after
// memory_manager/tests/fake_cuda, which has memory of its own, it adds what libraries of the wheels want beside that.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kNoDevice = 100, kNotFound = 500 };

int cuInit(unsigned flags) {
  (void)flags;
  const char* path = getenv("CUDA_STUB_LOG");
  FILE* log = path ? fopen(path, "a") : NULL;
  if (log) {
    fprintf(log, "cuInit %d\n", (int)getpid());
    fclose(log);
  }
  return kNoDevice;
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

static int missing(void) { return kNoDevice; }

// What libraries of the wheels are linked with.
#define MISSING(name) \
  int name(void) { return missing(); }
MISSING(cuCtxGetCurrent)
MISSING(cuCtxSetCurrent)
MISSING(cuDeviceGetAttribute)
MISSING(cuDeviceGetCount)
MISSING(cuDevicePrimaryCtxRetain)
MISSING(cuMemAddressFree)
MISSING(cuMemAddressReserve)
MISSING(cuMemCreate)
MISSING(cuMemGetAllocationGranularity)
MISSING(cuMemMap)
MISSING(cuMemRelease)
MISSING(cuMemSetAccess)
MISSING(cuMemUnmap)
MISSING(cuPointerGetAttribute)
MISSING(cuTensorMapEncodeTiled)

// What torch looks for by name when it is initialised.
MISSING(cuCtxFromGreenCtx)
MISSING(cuCtxPopCurrent)
MISSING(cuCtxPushCurrent)
MISSING(cuDevResourceGenerateDesc)
MISSING(cuDevSmResourceSplitByCount)
MISSING(cuDeviceGetDevResource)
MISSING(cuFuncGetAttribute)
MISSING(cuFuncSetAttribute)
MISSING(cuGreenCtxCreate)
MISSING(cuGreenCtxDestroy)
MISSING(cuGreenCtxStreamCreate)
MISSING(cuLaunchKernel)
MISSING(cuMemGetAddressRange)
MISSING(cuMemGetAllocationPropertiesFromHandle)
MISSING(cuMemGetHandleForAddressRange)
MISSING(cuMemRetainAllocationHandle)
MISSING(cuMemsetD32Async)
MISSING(cuModuleGetFunction)
MISSING(cuModuleLoadData)
MISSING(cuMulticastAddDevice)
MISSING(cuMulticastBindMem)
MISSING(cuMulticastCreate)
MISSING(cuMulticastUnbind)
MISSING(cuPointerGetAttributes)
MISSING(cuStreamWaitValue32)
MISSING(cuStreamWriteValue32)

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return 0;
}

// The runtime and NVIDIA's bindings for Python take their functions from here, by names without a version; those that are
// not there fail. Both ask for the present version of all, but for this function itself.
int cuGetProcAddress_v2(const char* symbol, void** function, int version, unsigned long long flags, int* status) {
  (void)version;
  (void)flags;
  char present[128];
  snprintf(present, sizeof present, "%s_v2", symbol);
  void* found = strcmp(symbol, "cuGetProcAddress") == 0 ? NULL : dlsym(RTLD_DEFAULT, present);
  if (!found) found = dlsym(RTLD_DEFAULT, symbol);
  *function = found ? found : (void*)missing;
  if (status) *status = 0;
  return 0;
}

int cuGetProcAddress(const char* symbol, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

int cuGetExportTable(const void** table, const void* id) {
  (void)id;
  *table = NULL;
  return kNotFound;
}

int cuGetErrorName(int error, const char** name) {
  (void)error;
  *name = "CUDA_ERROR_NO_DEVICE";
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  (void)error;
  *text = "no CUDA-capable device is detected (a stand-in)";
  return 0;
}
