// Stands in for libnccl.so.2: communicators are numbers, and nothing is sent. Several ranks start, load and are built, but
// compute nothing together. As NCCL does, it makes the whole GPU's context current. With CUDA_STUB_NO_MULTICAST the
// NVSwitch has no slot left for multicast, which NCCL_NVLS_ENABLE=0 does without.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int cudaGetDevice(int* device);
int cudaSetDevice(int device);

typedef int R;
typedef struct { char internal[128]; } Id;

static R number(void** made) {
  static uintptr_t last = 0x1000;
  *made = (void*)(last += 16);
  return 0;
}

R ncclGetVersion(int* version) { *version = 22907; return 0; }
R ncclGetUniqueId(Id* id) { memset(id, 7, sizeof *id); return 0; }
static R whole_gpu(void) {
  int device = 0;
  return cudaGetDevice(&device) || cudaSetDevice(device);
}
R ncclCommInitRank(void** made, int ranks, Id id, int rank) {
  (void)id; (void)rank;
  const char* multicast = getenv("NCCL_NVLS_ENABLE");
  whole_gpu();
  if (ranks > 1 && getenv("CUDA_STUB_NO_MULTICAST") && !(multicast && !strcmp(multicast, "0"))) return 1;
  return number(made);
}
R ncclCommInitRankConfig(void** made, int ranks, Id id, int rank, void* config) {
  (void)config;
  return ncclCommInitRank(made, ranks, id, rank);
}
R ncclCommSplit(void* of, int colour, int key, void** made, void* config) {
  (void)of; (void)colour; (void)key; (void)config;
  return number(made);
}
R ncclCommGetAsyncError(void* of, int* error) { (void)of; *error = 0; return 0; }
R ncclCommRegister(void* of, void* at, size_t size, void** made) { (void)of; (void)at; (void)size; return number(made); }
const char* ncclGetErrorString(R error) { return error ? "an error of the stand-in" : "no error"; }
const char* ncclGetLastError(void* of) { (void)of; return ""; }

#define SENDING(name) R name(void) { return whole_gpu(); }
SENDING(ncclAllGather) SENDING(ncclAllReduce) SENDING(ncclAlltoAll) SENDING(ncclBcast) SENDING(ncclBroadcast)
SENDING(ncclGroupEnd) SENDING(ncclRecv) SENDING(ncclReduce) SENDING(ncclReduceScatter) SENDING(ncclSend)

#define NOTHING(name) R name(void) { return 0; }
NOTHING(ncclCommAbort) NOTHING(ncclCommDeregister) NOTHING(ncclCommDestroy) NOTHING(ncclCommFinalize)
NOTHING(ncclGroupStart)

// Not stood in for: 3 is an internal error.
#define MISSING(name) R name(void) { return 3; }
MISSING(ncclCommCount) MISSING(ncclCommGetUniqueId) MISSING(ncclCommGrow) MISSING(ncclCommInitAll)
MISSING(ncclCommInitRankScalable) MISSING(ncclCommMemStats) MISSING(ncclCommResume) MISSING(ncclCommRevoke)
MISSING(ncclCommShrink) MISSING(ncclCommSuspend) MISSING(ncclCommUserRank) MISSING(ncclCommWindowDeregister)
MISSING(ncclCommWindowRegister) MISSING(ncclDevCommCreate) MISSING(ncclDevCommDestroy) MISSING(ncclGather)
MISSING(ncclGetLsaMultimemDevicePointer) MISSING(ncclGetPeerDevicePointer)
MISSING(ncclGroupSimulateEnd) MISSING(ncclMemAlloc) MISSING(ncclMemFree) MISSING(ncclPutSignal)
MISSING(ncclRedOpCreatePreMulSum) MISSING(ncclRedOpDestroy) MISSING(ncclSignal) MISSING(ncclWaitSignal)
MISSING(ncclWinGetUserPtr)
