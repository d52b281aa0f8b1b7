// Stands in for libnvidia-ml.so.1: two H200, as far as vLLM and torch ask before they touch a GPU.
#include <stdint.h>
#include <stdio.h>
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
  snprintf(uuid, length, "GPU-%08d-0000-0000-0000-000000000000", index_of(device));
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

int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }

// What torch looks for by name.
#define MISSING(name) \
  int name(void) { return 3; }
MISSING(nvmlDeviceGetComputeRunningProcesses)
MISSING(nvmlDeviceGetGpuFabricInfoV)
MISSING(nvmlDeviceGetHandleByPciBusId_v2)
MISSING(nvmlDeviceGetNvLinkRemoteDeviceType)
MISSING(nvmlDeviceGetNvLinkRemotePciInfo_v2)
