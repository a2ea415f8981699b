/* The host functions that a kernel compiled by the CuTe DSL (4.8, --enable-tvm-ffi) calls, over PyTorch's CUDA runtime.
 *
 * Signatures are those that the compiled host code itself declares (LLVM dialect), meanings those of the CUDA runtime
 * API of the same name. Everything is hidden: neither another kernel nor a library of the DSL in the process sees it.
 *
 * libcudart is found when a kernel is first called: the one that PyTorch is linked to, else one in the process by its
 * soname, else one on the loader's path. So a kernel loads without a GPU and without CUDA, and says what it lacks when
 * it is called.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#define HIDDEN __attribute__((visibility("hidden")))

enum { SUCCESS = 0, RAISED = -1 }; /* cudaError_t; RAISED: the error is set in tvm-ffi */

typedef void (*Raise)(const char *kind, const char *message);
typedef void (*RaiseParts)(const char *kind, const char **parts, int count);

/* What is called of CUDA: result, name, parameters. */
#define RUNTIME_API(X)                                                                                             \
    X(int, cudaLibraryLoadData, (void **, const void *, void *, void *, unsigned, void *, void *, unsigned))       \
    X(int, cudaLibraryGetKernel, (void **, void *, const char *))                                                  \
    X(int, cudaKernelSetAttributeForDevice, (void *, int, int, int))                                               \
    X(int, cudaDeviceGetAttribute, (int *, int, int))                                                              \
    X(int, cudaGetDevice, (int *))                                                                                 \
    X(int, cudaSetDevice, (int))                                                                                   \
    X(int, cudaGetDeviceCount, (int *))                                                                            \
    X(int, cudaLaunchKernelExC, (const void *, const void *, void **))                                             \
    X(const char *, cudaGetErrorName, (int))                                                                       \
    X(const char *, cudaGetErrorString, (int))

#define POINTER(result, name, parameters) static result(*name) parameters;
RUNTIME_API(POINTER)
static int (*cuKernelGetAttribute)(int *, int, void *, int);

static const struct {
    const char *name;
    void **function;
} WANTED[] = {
#define ROW(result, name, parameters) {#name, (void **)&name},
    RUNTIME_API(ROW)};

static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
static int ready; /* one kernel a shared object, so one state */

/* The CUDA runtime: PyTorch's, which may not be the newest in the process; else 13 before 12, one in the process before
 * one that would have to be loaded. */
static void *cuda_runtime(void) {
    static const char *const names[] = {"libcudart.so.13", "libcudart.so.12"};
    static const int modes[] = {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY};
    void *torch = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch && dlsym(torch, "cudaGetDevice")) return torch; /* dlsym searches the libraries that it is linked to, too */
    for (int mode = 0; mode < 2; mode++)
        for (int name = 0; name < 2; name++) {
            void *found = dlopen(names[name], modes[mode]);
            if (found) return found;
        }
    return NULL;
}

/* Find all that is called; 0, or RAISED. */
static int find_functions(Raise raise) {
    char said[256];
    void *runtime = cuda_runtime(), *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!runtime) {
        raise("RuntimeError", "neither libcudart.so.13 nor libcudart.so.12 is in this process or on the loader's path: "
                              "kernels run on the CUDA runtime of a PyTorch that is built for CUDA");
        return RAISED;
    }
    for (unsigned i = 0; i < sizeof WANTED / sizeof *WANTED; i++)
        if (!(*WANTED[i].function = dlsym(runtime, WANTED[i].name))) {
            snprintf(said, sizeof said, "the CUDA runtime in this process has no %s: kernels need CUDA 12.8 or newer",
                     WANTED[i].name);
            raise("RuntimeError", said);
            return RAISED;
        }
    if (driver) *(void **)&cuKernelGetAttribute = dlsym(driver, "cuKernelGetAttribute");
    if (!cuKernelGetAttribute) {
        raise("RuntimeError", "there is no NVIDIA driver (libcuda.so.1) with cuKernelGetAttribute");
        return RAISED;
    }
    return 0;
}

/* Whether the code is for a device: it is for compute capability 9.0, and other GPUs may be visible too. */
static int is_hopper(int device, int *hopper) {
    enum { MAJOR = 75, MINOR = 76 }; /* cudaDevAttrComputeCapability... */
    int major = 0, minor = 0, code = cudaDeviceGetAttribute(&major, MAJOR, device);
    if (code == SUCCESS) code = cudaDeviceGetAttribute(&minor, MINOR, device);
    *hopper = major == 9 && minor == 0;
    return code;
}

/* Called first in every launch: load the code and set the kernel's attributes on every Hopper GPU, once. */
HIDDEN int cuda_dialect_init_library_once(void **library, int (*load)(void **), int (*load_to_device)(void **, int),
                                          Raise raise) {
    if (__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) return SUCCESS;
    pthread_mutex_lock(&once);
    int code = SUCCESS, devices = 0, hopper;
    if (!ready && (code = find_functions(raise)) == SUCCESS) {
        code = cudaGetDeviceCount(&devices);
        if (code == SUCCESS && !*library) code = load(library);
        for (int device = 0; device < devices && code == SUCCESS; device++)
            if ((code = is_hopper(device, &hopper)) == SUCCESS && hopper) code = load_to_device(library, device);
        if (code == SUCCESS) {
            __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
        } else {
            char said[256];
            snprintf(said, sizeof said, "CUDA error %s while a kernel was loaded: %s", cudaGetErrorName(code),
                     cudaGetErrorString(code));
            raise("RuntimeError", said);
        }
    }
    pthread_mutex_unlock(&once);
    return code;
}

/* At the process's end; the code goes with the process, and CUDA may be gone already. */
HIDDEN void cuda_dialect_unload_library_once(void **library) { (void)library; }

HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaError(RaiseParts raise, int code) {
    const char *parts[] = {"CUDA error ", cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
    raise("RuntimeError", parts, 4);
}

/* The rest as CUDA has it. */
HIDDEN int _cudaLibraryLoadData(void **library, const void *code, void *jit, void *jit_values, unsigned jit_count,
                                void *options, void *values, unsigned count) {
    return cudaLibraryLoadData(library, code, jit, jit_values, jit_count, options, values, count);
}
HIDDEN int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    return cudaLibraryGetKernel(kernel, library, name);
}
HIDDEN int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    return cudaKernelSetAttributeForDevice(kernel, attribute, value, device);
}
HIDDEN int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}
HIDDEN int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    return cuKernelGetAttribute(value, attribute, kernel, device);
}
HIDDEN int _cudaGetDevice(int *device) { return cudaGetDevice(device); }
HIDDEN int _cudaSetDevice(int device) { return cudaSetDevice(device); }
HIDDEN int _cudaLaunchKernelEx(const void *config, const void *kernel, void **arguments) {
    return cudaLaunchKernelExC(config, kernel, arguments);
}
