/* Stand-ins for libcudart.so.13 and libcuda.so.1: they say on stderr how they are called, and fail where $FAILS says.
 * There are two devices: Hopper GPUs, but for the one that $OTHER names, which kernels have no code for. MARK tells two
 * libraries apart. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Config { unsigned grid[3], block[3]; size_t shared; void *stream, *attributes; unsigned count; };

#ifndef MARK
#define MARK ""
#endif

static int calls(const char *name) {
    const char *fails = getenv("FAILS");
    fprintf(stderr, MARK "%s\n", name);
    return fails && !strcmp(fails, name) ? 700 : 0;
}
static int is_other(int device) {
    const char *other = getenv("OTHER");
    return other && atoi(other) == device;
}
static __thread int current;
int cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    *library = (void *)code;
    return calls("cudaLibraryLoadData");
}
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = library;
    return calls("cudaLibraryGetKernel");
}
int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    fprintf(stderr, "device %d: ", device);
    return is_other(device) ? 209 : calls("cudaKernelSetAttributeForDevice");
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? (is_other(device) ? 8 : 9) : attribute == 76 ? 0 : 232448;
    return calls("cudaDeviceGetAttribute");
}
int cudaGetDevice(int *device) { *device = current; return calls("cudaGetDevice"); }
int cudaSetDevice(int device) { current = device; fprintf(stderr, "device %d: ", device); return calls("cudaSetDevice"); }
int cudaGetDeviceCount(int *count) { *count = 2; return calls("cudaGetDeviceCount"); }
#ifndef OLD
int cudaLaunchKernelExC(const struct Config *config, const void *kernel, void **arguments) {
    fprintf(stderr, "%x, grid %u, block %u, shared %zu: ", *(const unsigned *)kernel, config->grid[0],
            config->block[0], config->shared);
    if (is_other(current)) return 209;
    return calls("cudaLaunchKernelExC");
}
#endif
const char *cudaGetErrorName(int code) { return "cudaErrorIllegalAddress"; }
const char *cudaGetErrorString(int code) { return "an illegal memory access was encountered"; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    *value = 0;
    return is_other(device) ? 209 : calls("cuKernelGetAttribute");
}
