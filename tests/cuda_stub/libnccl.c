// Stands in for libnccl.so.2: communicators are numbers, and nothing is sent. Several ranks start, load and are built, but
// compute nothing together.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int R;
typedef struct { char internal[128]; } Id;

static R number(void** made) {
  static uintptr_t last = 0x1000;
  *made = (void*)(last += 16);
  return 0;
}

R ncclGetVersion(int* version) { *version = 22907; return 0; }
R ncclGetUniqueId(Id* id) { memset(id, 7, sizeof *id); return 0; }
R ncclCommInitRank(void** made, int ranks, Id id, int rank) { (void)ranks; (void)id; (void)rank; return number(made); }
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

#define NOTHING(name) R name(void) { return 0; }
NOTHING(ncclAllGather) NOTHING(ncclAllReduce) NOTHING(ncclAlltoAll) NOTHING(ncclBcast) NOTHING(ncclBroadcast)
NOTHING(ncclCommAbort) NOTHING(ncclCommDeregister) NOTHING(ncclCommDestroy) NOTHING(ncclCommFinalize)
NOTHING(ncclGroupEnd) NOTHING(ncclGroupStart) NOTHING(ncclRecv) NOTHING(ncclReduce) NOTHING(ncclReduceScatter)
NOTHING(ncclSend)

// Not stood in for: 3 is an internal error.
#define MISSING(name) R name(void) { return 3; }
MISSING(ncclCommCount) MISSING(ncclCommInitAll) MISSING(ncclCommInitRankScalable) MISSING(ncclCommMemStats)
MISSING(ncclCommResume) MISSING(ncclCommShrink) MISSING(ncclCommSuspend) MISSING(ncclCommUserRank)
MISSING(ncclCommWindowDeregister) MISSING(ncclCommWindowRegister) MISSING(ncclDevCommCreate)
MISSING(ncclDevCommDestroy) MISSING(ncclGetLsaMultimemDevicePointer) MISSING(ncclGetPeerDevicePointer)
MISSING(ncclGroupSimulateEnd) MISSING(ncclMemAlloc) MISSING(ncclMemFree) MISSING(ncclPutSignal)
MISSING(ncclRedOpCreatePreMulSum) MISSING(ncclRedOpDestroy) MISSING(ncclSignal) MISSING(ncclWaitSignal)
