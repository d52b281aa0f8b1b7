// Stands in for what vLLM calls of libcublas.so.13 and libcublasLt.so.13, in front of the real ones: handles are numbers,
// and of all products only that of small float32 matrices is computed, by which `doctor --gpu` sees whether torch
// computes.
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

R cublasSgemm_v2(void* handle, int flip_a, int flip_b, int m, int n, int k, const float* alpha, const float* a, int lda,
                 const float* b, int ldb, const float* beta, float* c, int ldc) {
  (void)handle;
  if ((long)m * n * k > 1 << 20) return 0;
  for (int row = 0; row < m; row++) {
    for (int column = 0; column < n; column++) {
      float sum = 0;
      for (int i = 0; i < k; i++)
        sum += (flip_a ? a[row * lda + i] : a[i * lda + row]) * (flip_b ? b[i * ldb + column] : b[column * ldb + i]);
      float* place = &c[column * ldc + row];
      *place = *alpha * sum + (*beta == 0 ? 0 : *beta * *place);
    }
  }
  return 0;
}

#define NOTHING(name) R name(void) { return 0; }
NOTHING(cublasDestroy_v2) NOTHING(cublasGemmEx) NOTHING(cublasGemmStridedBatchedEx) NOTHING(cublasLtMatmul)
NOTHING(cublasLtMatmulDescDestroy) NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute) NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget) NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSgemmStridedBatched)
