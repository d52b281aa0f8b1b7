// Stands in for libcudart.so.13 in front of the real one: device memory is memory of the machine, copies and sets of bytes
// are made at once, streams and events are numbers, and kernels are not launched. Shows as many GPUs as
// FAKE_CUDA_DEVICES says, which are those of the driver's stand-in (memory_manager/tests/fake_cuda).
#include <driver_types.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef cudaError_t E;
enum { kMost = 1 << 16 };

static __thread int device = 0;
static struct {
  char* start;
  size_t size;
  int host;
} taken[kMost];
static int count = 0;
static size_t allocated = 0;

static int devices(void) {
  const char* said = getenv("FAKE_CUDA_DEVICES");
  return said ? atoi(said) : 1;
}

// Memory that was asked for here, newest first; only one thread of a process loads weights.
static E take(void** pointer, size_t size, int host) {
  void* found = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED || count == kMost) return cudaErrorMemoryAllocation;
  taken[count].start = found;
  taken[count].size = size ? size : 1;
  taken[count++].host = host;
  if (!host) allocated += size;
  *pointer = found;
  return 0;
}

static E give_back(void* pointer) {
  for (int i = count - 1; pointer && i >= 0; i--) {
    if (taken[i].start != pointer) continue;
    munmap(taken[i].start, taken[i].size);
    if (!taken[i].host) allocated -= taken[i].size;
    taken[i] = taken[--count];
    break;
  }
  return 0;
}

E cudaMalloc(void** pointer, size_t size) { return take(pointer, size, 0); }
E cudaMallocAsync(void** pointer, size_t size, void* stream) { (void)stream; return take(pointer, size, 0); }
E cudaFree(void* pointer) { return give_back(pointer); }
E cudaFreeAsync(void* pointer, void* stream) { (void)stream; return give_back(pointer); }
E cudaHostAlloc(void** pointer, size_t size, unsigned flags) { (void)flags; return take(pointer, size, 1); }
E cudaFreeHost(void* pointer) { return give_back(pointer); }
E cudaHostGetDevicePointer(void** out, void* pointer, unsigned flags) { (void)flags; *out = pointer; return 0; }

// What another process has of its own memory (vLLM's buffers for all-reduce) is a place where nobody writes.
E cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &pointer, sizeof pointer);
  return 0;
}
E cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  (void)handle;
  (void)flags;
  return take(pointer, 16 << 20, 1);
}
E cudaIpcCloseMemHandle(void* pointer) { return give_back(pointer); }

E cudaMemGetInfo(size_t* left, size_t* total) {
  *total = (size_t)143771 << 20;
  *left = *total - allocated;
  return 0;
}

E cudaMemcpy(void* to, const void* from, size_t size, int kind) { (void)kind; memcpy(to, from, size); return 0; }
E cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  (void)stream;
  return cudaMemcpy(to, from, size, kind);
}
E cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t rows, int kind,
                    void* stream) {
  (void)kind;
  (void)stream;
  for (size_t row = 0; row < rows; row++) memcpy((char*)to + row * to_pitch, (const char*)from + row * pitch, width);
  return 0;
}
E cudaMemset(void* at, int value, size_t size) { memset(at, value, size); return 0; }
E cudaMemsetAsync(void* at, int value, size_t size, void* stream) { (void)stream; return cudaMemset(at, value, size); }

E cudaPointerGetAttributes(struct cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  // What another library has mapped is not known here; nobody asks of memory that is the host's.
  found->type = cudaMemoryTypeDevice;
  found->device = device;
  found->devicePointer = found->hostPointer = (void*)pointer;
  for (int i = 0; i < count; i++)
    if (taken[i].host && taken[i].start <= (char*)pointer && (char*)pointer < taken[i].start + taken[i].size)
      found->type = cudaMemoryTypeHost;
  return 0;
}

E cudaGetDeviceCount(int* found) { *found = devices(); return 0; }
E cudaGetDevice(int* found) { *found = device; return 0; }
E cudaSetDevice(int wanted) { device = wanted; return 0; }
E cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
E cudaRuntimeGetVersion(int* version) { *version = 13000; return 0; }

E cudaGetDeviceProperties(struct cudaDeviceProp* found, int which) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "NVIDIA H200");
  for (int i = 0; i < 15; i++) found->uuid.bytes[i] = (char)i;
  found->uuid.bytes[15] = (char)which;
  found->totalGlobalMem = (size_t)143771 << 20;
  found->major = 9;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = found->sharedMemPerMultiprocessor = 227 << 10;
  found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 50 << 20;
  return 0;
}

E cudaDeviceGetAttribute(int* value, int which, int of) {
  (void)of;
  struct cudaDeviceProp found;
  cudaGetDeviceProperties(&found, of);
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = found.major; break;
    case cudaDevAttrMultiProcessorCount: *value = found.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)found.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)found.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return 0;
}

E cudaDeviceGetPCIBusId(char* text, int size, int of) { snprintf(text, (size_t)size, "0000:%02x:00.0", of); return 0; }
E cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return 0; }
E cudaDeviceCanAccessPeer(int* can, int a, int b) { (void)a; (void)b; *can = 1; return 0; }

static E number(void** made) {
  static uintptr_t last = 0x1000;
  *made = (void*)(last += 16);
  return 0;
}
E cudaStreamCreate(void** made) { return number(made); }
E cudaStreamCreateWithFlags(void** made, unsigned flags) { (void)flags; return number(made); }
E cudaStreamCreateWithPriority(void** made, unsigned flags, int at) { (void)flags; (void)at; return number(made); }
E cudaEventCreate(void** made) { return number(made); }
E cudaEventCreateWithFlags(void** made, unsigned flags) { (void)flags; return number(made); }
E cudaEventElapsedTime(float* found, void* a, void* b) { (void)a; (void)b; *found = 1; return 0; }
E cudaStreamGetPriority(void* stream, int* found) { (void)stream; *found = 0; return 0; }
E cudaStreamIsCapturing(void* stream, int* found) { (void)stream; *found = 0; return 0; }
E cudaStreamGetCaptureInfo(void* stream, int* found, unsigned long long* id) {
  (void)stream;
  *found = 0;
  if (id) *id = 0;
  return 0;
}
E cudaThreadExchangeStreamCaptureMode(int* mode) { (void)mode; return 0; }

E cudaFuncGetAttributes(struct cudaFuncAttributes* found, const void* of) {
  (void)of;
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->binaryVersion = found->ptxVersion = 90;
  return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* of, int threads, size_t shared) {
  (void)of; (void)threads; (void)shared;
  *n = 1;
  return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* of, int threads, size_t shared,
                                                         unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, of, threads, shared);
}

const char* cudaGetErrorName(E error) { return error ? "cudaErrorOfTheStandIn" : "cudaSuccess"; }
const char* cudaGetErrorString(E error) { return error ? "an error of the stand-in" : "no error"; }

// Kernels: registered and launched into nothing.
void** __cudaRegisterFatBinary(void* binary) { (void)binary; return calloc(1, sizeof(void*)); }
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void** handle) { (void)handle; return 1; }
unsigned __cudaPushCallConfiguration(void) { return 0; }

#define NOTHING(name) E name(void) { return 0; }
NOTHING(__cudaGetKernel) NOTHING(__cudaLaunchKernel) NOTHING(__cudaPopCallConfiguration)
NOTHING(cudaDeviceEnablePeerAccess) NOTHING(cudaDeviceGetDefaultMemPool) NOTHING(cudaDeviceSynchronize)
NOTHING(cudaEventDestroy) NOTHING(cudaEventQuery) NOTHING(cudaEventRecord) NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaEventSynchronize) NOTHING(cudaFuncSetAttribute) NOTHING(cudaGetLastError) NOTHING(cudaHostRegister)
NOTHING(cudaHostUnregister) NOTHING(cudaKernelSetAttributeForDevice) NOTHING(cudaLaunchCooperativeKernel)
NOTHING(cudaLaunchKernel) NOTHING(cudaLaunchKernelExC) NOTHING(cudaMemPoolSetAttribute) NOTHING(cudaMemPoolTrimTo)
NOTHING(cudaPeekAtLastError) NOTHING(cudaProfilerStart) NOTHING(cudaProfilerStop) NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamQuery) NOTHING(cudaStreamSynchronize) NOTHING(cudaStreamWaitEvent) NOTHING(cudaLibraryUnload)

// Not stood in for.
#define MISSING(name) E name(void) { return cudaErrorNotSupported; }
MISSING(cudaGetDriverEntryPointByVersion) MISSING(cudaGetSymbolAddress) MISSING(cudaGraphAddNode)
MISSING(cudaGraphConditionalHandleCreate) MISSING(cudaGraphDebugDotPrint) MISSING(cudaGraphDestroy)
MISSING(cudaGraphExecDestroy) MISSING(cudaGraphGetNodes) MISSING(cudaGraphInstantiateWithFlags)
MISSING(cudaGraphLaunch) MISSING(cudaGraphNodeGetDependencies) MISSING(cudaIpcGetEventHandle)
MISSING(cudaIpcOpenEventHandle) MISSING(cudaLaunchHostFunc) MISSING(cudaLibraryGetKernel) MISSING(cudaLibraryLoadData)
MISSING(cudaMemPoolGetAttribute) MISSING(cudaMemPoolSetAccess) MISSING(cudaMemcpyPeerAsync)
MISSING(cudaMemcpyToSymbol) MISSING(cudaStreamAddCallback) MISSING(cudaStreamBeginCapture)
MISSING(cudaStreamBeginCaptureToGraph) MISSING(cudaStreamEndCapture) MISSING(cudaStreamUpdateCaptureDependencies)
