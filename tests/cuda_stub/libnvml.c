// Stands in for libnvidia-ml.so.1: two H200, as far as vLLM and torch ask before they touch a GPU. CUDA_STUB_DRIVER is the
// version of CUDA that the driver knows (13000).
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kGpus = 2, kInvalid = 2 };

typedef void* Device;

static int index_of(Device device) { return (int)(intptr_t)device - 1; }

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int error) { (void)error; return "an error of the stand-in"; }

int nvmlDeviceGetCount_v2(unsigned* count) { *count = kGpus; return 0; }
int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  if (index >= kGpus) return kInvalid;
  *device = (Device)(intptr_t)(index + 1);
  return 0;
}
int nvmlDeviceGetHandleByIndex(unsigned index, Device* device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }

int nvmlDeviceGetUUID(Device device, char* uuid, unsigned length) {
  snprintf(uuid, length, "GPU-00010203-0405-0607-0809-0a0b0c0d0e%02x", index_of(device));
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, Device* device) {
  for (unsigned index = 0; index < kGpus; index++) {
    char own[80];
    nvmlDeviceGetUUID((Device)(intptr_t)(index + 1), own, sizeof own);
    if (!strcmp(own, uuid)) return nvmlDeviceGetHandleByIndex_v2(index, device);
  }
  return kInvalid;
}

int nvmlDeviceGetIndex(Device device, unsigned* index) { *index = (unsigned)index_of(device); return 0; }

int nvmlDeviceGetName(Device device, char* name, unsigned length) {
  (void)device;
  snprintf(name, length, "NVIDIA H200");
  return 0;
}

int nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
  (void)device;
  *major = 9;
  *minor = 0;
  return 0;
}

typedef struct { unsigned long long total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device device, Memory* memory) {
  (void)device;
  memory->total = memory->free = 143771ULL << 20;
  memory->used = 0;
  return 0;
}

int nvmlDeviceGetP2PStatus(Device a, Device b, int kind, int* status) {
  (void)a; (void)b; (void)kind;
  *status = 0;
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  const char* said = getenv("CUDA_STUB_DRIVER");
  *version = said ? atoi(said) : 13000;
  return 0;
}

int nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

int nvmlSystemGetDriverVersion(char* text, unsigned length) { snprintf(text, length, "580.65.06"); return 0; }

// Nobody computes.
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* count, void* found) {
  (void)device;
  (void)found;
  *count = 0;
  return 0;
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, unsigned* count, void* found) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, found);
}

// What torch and our own questions look for by name.
#define MISSING(name) \
  int name(void) { return 3; }
MISSING(nvmlDeviceGetComputeMode)
MISSING(nvmlDeviceGetMigMode)
MISSING(nvmlDeviceGetRemappedRows)
MISSING(nvmlDeviceGetTotalEccErrors)
MISSING(nvmlDeviceGetUtilizationRates)
MISSING(nvmlDeviceGetComputeRunningProcesses)
MISSING(nvmlDeviceGetGpuFabricInfoV)
MISSING(nvmlDeviceGetHandleByPciBusId_v2)
MISSING(nvmlDeviceGetNvLinkRemoteDeviceType)
MISSING(nvmlDeviceGetNvLinkRemotePciInfo_v2)
