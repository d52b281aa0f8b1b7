// What Triton and torch ask of the driver about kernels before they launch them (streams.cpp), in front of the other
// stand-ins of libcuda.so.1: modules are numbers.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int R;

static R number(void** made) {
  static uintptr_t last = 0x1000;
  *made = (void*)(last += 16);
  return 0;
}

// Of an H200, where Triton compiles by it.
R cuDeviceGetAttribute(int* value, int which, int device) {
  (void)device;
  switch (which) {
    case 102: *value = getenv("FAKE_CUDA_NO_VMM") == NULL; break;  // memory can be exported as a descriptor
    case 10: *value = 32; break;               // threads of a warp
    case 12: *value = 65536; break;            // registers of a block
    case 16: *value = 132; break;              // multiprocessors
    case 75: *value = 9; break;                // compute capability
    case 76: *value = 0; break;
    case 81: case 97: *value = 227 << 10; break;  // shared memory of a multiprocessor, and of a block that asks for it
    default: *value = 1;
  }
  return 0;
}

R cuModuleLoad(void** module, const char* path) { (void)path; return number(module); }
R cuModuleLoadData(void** module, const void* image) { (void)image; return number(module); }
R cuFuncGetAttribute(int* value, int which, void* function) {
  (void)function;
  *value = which == 0 ? 1024 : 0;  // threads of a block
  return 0;
}
R cuCtxGetLimit(size_t* value, int which) { (void)which; *value = 0; return 0; }
R cuOccupancyMaxActiveClusters(int* count, void* function, const void* config) {
  (void)function; (void)config;
  *count = 1;
  return 0;
}
// 11 is where its allocation begins.
R cuMemGetAddressRange_v2(unsigned long long* base, size_t* size, unsigned long long pointer);
R cuPointerGetAttribute(void* value, int which, unsigned long long pointer) {
  unsigned long long base = 0;
  size_t size = 0;
  if (which != 11 || cuMemGetAddressRange_v2(&base, &size, pointer)) base = pointer;
  memcpy(value, &base, sizeof base);
  return 0;
}

#define NOTHING(name) R name(void) { return 0; }
NOTHING(cuCtxSetLimit) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuMemsetD32Async) NOTHING(cuModuleUnload) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuTensorMapEncodeTiled)
