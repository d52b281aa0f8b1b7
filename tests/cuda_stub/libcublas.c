// Stands in for what vLLM calls of libcublas.so.13 and libcublasLt.so.13, in front of the real ones: handles are numbers,
// and products are not computed.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int R;

static R number(void** made) {
  static uintptr_t last = 0x1000;
  *made = (void*)(last += 16);
  return 0;
}

R cublasCreate_v2(void** made) { return number(made); }
R cublasGetMathMode(void* handle, int* mode) { (void)handle; *mode = 0; return 0; }
R cublasGetPointerMode_v2(void* handle, int* mode) { (void)handle; *mode = 0; return 0; }
R cublasLtMatmulDescCreate(void** made, int compute, int scale) { (void)compute; (void)scale; return number(made); }
R cublasLtMatmulPreferenceCreate(void** made) { return number(made); }
R cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t lead) {
  (void)type; (void)rows; (void)columns; (void)lead;
  return number(made);
}
size_t cublasLtGetVersion(void) { return 130000; }

// One way to compute it, which needs no workspace (cublasLtMatmulHeuristicResult_t: algorithm, bytes, status, waves).
R cublasLtMatmulAlgoGetHeuristic(void* handle, void* of, void* a, void* b, void* c, void* d, void* preference, int most,
                                 void* found, int* count) {
  (void)handle; (void)of; (void)a; (void)b; (void)c; (void)d; (void)preference;
  if (most > 0) memset(found, 0, 96);
  *count = most > 0;
  return 0;
}

#define NOTHING(name) R name(void) { return 0; }
NOTHING(cublasDestroy_v2) NOTHING(cublasGemmEx) NOTHING(cublasGemmStridedBatchedEx) NOTHING(cublasLtMatmul)
NOTHING(cublasLtMatmulDescDestroy) NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute) NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget) NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSgemm_v2)
NOTHING(cublasSgemmStridedBatched)
