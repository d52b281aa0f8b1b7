// Stands in for libcudart.so.13 in front of the real one: device memory is the driver's, copies and sets of bytes are made
// at once, kernels compute nothing; streams, contexts and graphs are those of the driver's stand-in (streams.cpp). Shows
// as many GPUs as FAKE_CUDA_DEVICES says, which are those of that stand-in (memory_manager/tests/fake_cuda).
//
//   CUDA_STUB_WHOLE    clients of MPS see all SMs, whatever their percentage
//   CUDA_STUB_TRUE     a byte that is copied from the device is 1: what is compared there is the same
//   CUDA_STUB_FLOAT    four bytes that are copied from the device are this number; after a graph was launched,
//                      CUDA_STUB_GRAPH_FLOAT
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef cudaError_t E;

// A function of the driver's stand-in.
static void* driver(const char* name) {
  static void* library = NULL;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* found = library ? dlsym(library, name) : NULL;
  if (!found) {
    fprintf(stderr, "the stand-in for libcuda.so.1 has no %s\n", name);
    abort();
  }
  return found;
}
#define DRIVER(result, name, ...) ((result(*)(__VA_ARGS__))driver(#name))

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

static E forbidden(const char* call) { return DRIVER(int, stub_forbidden, const char*)(call); }

// As the runtime does: the whole GPU's context, unless another is current.
static void with_context(void) {
  void* current = NULL;
  DRIVER(int, cuCtxGetCurrent, void**)(&current);
  if (!current) DRIVER(int, cuCtxSetCurrent, void*)((void*)(intptr_t)(device + 1));
}

static E take(void** pointer, size_t size, int host) {
  if (!size) size = 1;
  if (forbidden("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
  if (count == kMost) return cudaErrorMemoryAllocation;
  if (host) {
    *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) return cudaErrorMemoryAllocation;
  } else {
    with_context();
    if (DRIVER(int, cuMemAlloc_v2, void**, size_t)(pointer, size)) return cudaErrorMemoryAllocation;
    allocated += size;
  }
  taken[count].start = *pointer;
  taken[count].size = size;
  taken[count++].host = host;
  return 0;
}

// Newest first; only one thread of a process loads weights.
static E give_back(void* pointer) {
  if (forbidden("cudaFree")) return cudaErrorStreamCaptureUnsupported;
  for (int i = count - 1; pointer && i >= 0; i--) {
    if (taken[i].start != pointer) continue;
    if (taken[i].host) {
      munmap(taken[i].start, taken[i].size);
    } else {
      DRIVER(int, cuMemFree_v2, void*)(pointer);
      allocated -= taken[i].size;
    }
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

E cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return DRIVER(int, cuIpcGetMemHandle, cudaIpcMemHandle_t*, void*)(handle, pointer);
}
E cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  with_context();
  return DRIVER(int, cuIpcOpenMemHandle_v2, void**, cudaIpcMemHandle_t, unsigned)(pointer, handle, flags);
}
E cudaIpcCloseMemHandle(void* pointer) { return DRIVER(int, cuIpcCloseMemHandle, void*)(pointer); }

E cudaMemGetInfo(size_t* left, size_t* total) {
  *total = (size_t)143771 << 20;
  *left = *total - allocated;
  return 0;
}

static int replayed = 0;
static void told(void* to, size_t size, int kind) {
  if (kind != cudaMemcpyDeviceToHost) return;
  const char* number = replayed ? getenv("CUDA_STUB_GRAPH_FLOAT") : NULL;
  if (!number) number = getenv("CUDA_STUB_FLOAT");
  if (size == 1 && getenv("CUDA_STUB_TRUE")) *(char*)to = 1;
  if (size == sizeof(float) && number) *(float*)to = strtof(number, NULL);
}
E cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  if (forbidden("cudaMemcpy")) return cudaErrorStreamCaptureUnsupported;
  memcpy(to, from, size);
  told(to, size, kind);
  return 0;
}
E cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  E result = DRIVER(int, stub_copy, void*, const void*, size_t, void*)(to, from, size, stream);
  told(to, size, kind);
  return result;
}
E cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t rows, int kind,
                    void* stream) {
  (void)kind;
  (void)stream;
  for (size_t row = 0; row < rows; row++) memcpy((char*)to + row * to_pitch, (const char*)from + row * pitch, width);
  return 0;
}
E cudaMemset(void* at, int value, size_t size) { memset(at, value, size); return 0; }
E cudaMemsetAsync(void* at, int value, size_t size, void* stream) {
  return DRIVER(int, stub_set, void*, int, size_t, void*)(at, value, size, stream);
}

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
// Whatever context was current, the whole GPU's is then.
E cudaSetDevice(int wanted) {
  device = wanted;
  return DRIVER(int, cuCtxSetCurrent, void*)((void*)(intptr_t)(wanted + 1));
}
E cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
E cudaRuntimeGetVersion(int* version) { *version = 13000; return 0; }

// A client of MPS sees its percentage, rounded down to pairs.
static int multiprocessors(void) {
  const char* percentage = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
  const char* pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
  char control[256];
  snprintf(control, sizeof control, "%s/control", pipe ? pipe : "/tmp/nvidia-mps");
  if (!percentage || getenv("CUDA_STUB_WHOLE") || access(control, F_OK)) return 132;
  return 132 * atoi(percentage) / 100 / 2 * 2;
}

E cudaGetDeviceProperties(struct cudaDeviceProp* found, int which) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "NVIDIA H200");
  for (int i = 0; i < 15; i++) found->uuid.bytes[i] = (char)i;
  found->uuid.bytes[15] = (char)which;
  found->totalGlobalMem = (size_t)143771 << 20;
  found->major = 9;
  found->multiProcessorCount = multiprocessors();
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
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
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
E cudaStreamCreate(void** made) {
  with_context();
  return DRIVER(int, stub_stream_create, void**)(made);
}
E cudaStreamCreateWithFlags(void** made, unsigned flags) { (void)flags; return cudaStreamCreate(made); }
E cudaStreamCreateWithPriority(void** made, unsigned flags, int at) { (void)flags; (void)at; return cudaStreamCreate(made); }
E cudaEventCreate(void** made) { return number(made); }
E cudaEventCreateWithFlags(void** made, unsigned flags) { (void)flags; return number(made); }
// Long enough for Triton, which tries variants of a kernel, to try each of them once.
E cudaEventElapsedTime(float* found, void* a, void* b) { (void)a; (void)b; *found = 1000; return 0; }
E cudaEventRecord(void* event, void* stream) { DRIVER(void, stub_record, void*, void*)(event, stream); return 0; }
E cudaEventRecordWithFlags(void* event, void* stream, unsigned flags) { (void)flags; return cudaEventRecord(event, stream); }
E cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  (void)flags;
  DRIVER(void, stub_wait, void*, void*)(stream, event);
  return 0;
}
E cudaStreamGetPriority(void* stream, int* found) { (void)stream; *found = 0; return 0; }

static unsigned long long capture_of(void* stream) { return DRIVER(unsigned long long, stub_capture_of, void*)(stream); }
E cudaStreamIsCapturing(void* stream, int* found) { *found = capture_of(stream) != 0; return 0; }
E cudaStreamGetCaptureInfo(void* stream, int* found, unsigned long long* id, void** graph, void** nodes, void** edges,
                           size_t* size) {
  unsigned long long own = capture_of(stream);
  *found = own != 0;
  if (id) *id = own;
  if (graph) *graph = NULL;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (size) *size = 0;
  return 0;
}
E cudaThreadExchangeStreamCaptureMode(int* mode) { *mode = DRIVER(int, stub_exchange_mode, int)(*mode); return 0; }
E cudaStreamSynchronize(void* stream) { return capture_of(stream) ? forbidden("cudaStreamSynchronize") : 0; }
E cudaDeviceSynchronize(void) { return forbidden("cudaDeviceSynchronize"); }

E cudaStreamBeginCapture(void* stream, int mode) {
  DRIVER(int, stub_exchange_mode, int)(mode);
  return DRIVER(int, stub_begin, void*)(stream);
}
E cudaStreamEndCapture(void* stream, void** graph) { return DRIVER(int, stub_end, void*, void**)(stream, graph); }
E cudaGraphGetNodes(void* graph, void** nodes, size_t* size) {
  if (!nodes) *size = DRIVER(size_t, stub_nodes, void*)(graph);
  return 0;
}
E cudaGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
  (void)flags;
  *made = DRIVER(void*, stub_instantiate, void*)(graph);
  return 0;
}
E cudaGraphLaunch(void* executable, void* stream) {
  (void)stream;
  replayed = 1;
  return DRIVER(int, stub_replay, void*)(executable);
}
// What a graph keeps until it is destroyed, and memory that graphs allocate, of which there is none.
E cudaUserObjectCreate(void** made, void* of, void* destroy, unsigned count, unsigned flags) {
  (void)of; (void)destroy; (void)count; (void)flags;
  return number(made);
}
E cudaDeviceGetGraphMemAttribute(int of, int which, void* value) { (void)of; (void)which; *(uint64_t*)value = 0; return 0; }
E cudaGraphDestroy(void* graph) { DRIVER(void, stub_destroy, void*)(graph); return 0; }
E cudaGraphExecDestroy(void* executable) { DRIVER(void, stub_drop, void*)(executable); return 0; }

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

E cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned version, unsigned long long flags,
                                   int* status) {
  (void)version; (void)flags;
  *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), symbol);
  if (status) *status = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return 0;
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

static __thread struct { dim3 grid, block; size_t shared; void* stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared = shared;
  pushed.stream = stream;
  return 0;
}
E __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(void**)stream = pushed.stream;
  return 0;
}
static E launch(void* stream) { DRIVER(void, stub_launch, void*, const char*, void**)(stream, NULL, NULL); return 0; }
E cudaLaunchKernel(const void* of, dim3 grid, dim3 block, void** params, size_t shared, void* stream) {
  (void)of; (void)grid; (void)block; (void)params; (void)shared;
  return launch(stream);
}
E __cudaLaunchKernel(void* of, dim3 grid, dim3 block, void** params, size_t shared, void* stream) {
  return cudaLaunchKernel(of, grid, block, params, shared, stream);
}
E cudaLaunchCooperativeKernel(const void* of, dim3 grid, dim3 block, void** params, size_t shared, void* stream) {
  return cudaLaunchKernel(of, grid, block, params, shared, stream);
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* of, void** params) {
  (void)of; (void)params;
  return launch(config->stream);
}

#define NOTHING(name) E name(void) { return 0; }
NOTHING(__cudaGetKernel) NOTHING(cudaDeviceEnablePeerAccess) NOTHING(cudaDeviceGetDefaultMemPool)
NOTHING(cudaDeviceSetGraphMemAttribute) NOTHING(cudaGraphRetainUserObject) NOTHING(cudaUserObjectRelease)
NOTHING(cudaEventDestroy) NOTHING(cudaEventQuery) NOTHING(cudaEventSynchronize) NOTHING(cudaFuncSetAttribute)
NOTHING(cudaGetLastError) NOTHING(cudaHostRegister) NOTHING(cudaHostUnregister)
NOTHING(cudaKernelSetAttributeForDevice) NOTHING(cudaMemPoolSetAttribute) NOTHING(cudaMemPoolTrimTo)
NOTHING(cudaPeekAtLastError) NOTHING(cudaProfilerStart) NOTHING(cudaProfilerStop) NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamQuery) NOTHING(cudaLibraryUnload)

// Not stood in for.
#define MISSING(name) E name(void) { return cudaErrorNotSupported; }
MISSING(cudaGetSymbolAddress) MISSING(cudaGraphAddNode)
MISSING(cudaGraphConditionalHandleCreate) MISSING(cudaGraphDebugDotPrint) MISSING(cudaGraphNodeGetDependencies)
MISSING(cudaIpcGetEventHandle) MISSING(cudaIpcOpenEventHandle) MISSING(cudaLaunchHostFunc) MISSING(cudaLibraryGetKernel)
MISSING(cudaLibraryLoadData) MISSING(cudaMemPoolGetAttribute) MISSING(cudaMemPoolSetAccess) MISSING(cudaMemcpyPeerAsync)
MISSING(cudaMemcpyToSymbol) MISSING(cudaStreamAddCallback) MISSING(cudaStreamBeginCaptureToGraph)
MISSING(cudaStreamUpdateCaptureDependencies)
