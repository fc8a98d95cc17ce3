/* A stand-in for libcuda with memory in files, for `trainer doctor` on machines without a GPU.
 *   FAKE_GPUS    how many GPUs there are
 *   FAKE_INIT    what cuInit answers (default 0)
 *   FAKE_PEERS   works, none (the driver offers no peer access), or lies (it offers it, and what is written gets lost)
 *   FAKE_MEMORY  a folder: each allocation is a file in it, whose name is its IPC handle */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID = 1, NO_DEVICE = 100, BAD_DEVICE = 101, PEER_UNSUPPORTED = 217, BYTES_OF_IPC = 64, MOST = 64 };
typedef struct { char name[BYTES_OF_IPC]; } Handle;
typedef struct { char *base; size_t bytes; int device; char name[BYTES_OF_IPC]; } Block;

static Block blocks[MOST];
static int contexts[16];
static __thread int current = -1;
static int serial;

static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static int peers(const char *what) { const char *v = getenv("FAKE_PEERS"); return v && strcmp(v, what) == 0; }

int cuInit(unsigned flags) { (void)flags; return number("FAKE_INIT", 0); }
int cuGetErrorName(int code, const char **name) {
    *name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == PEER_UNSUPPORTED ? "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
          : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_GPUS", 1); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index < number("FAKE_GPUS", 1) ? 0 : BAD_DEVICE; }
int cuDeviceGetName(char *name, int bytes, int device) { snprintf(name, bytes, "Fake GPU %c", 'A' + device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device + 1) << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    *value = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 132 : -1;
    return *value < 0 ? INVALID : 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0x10 + device, 16); return 0; }
int cuDeviceCanAccessPeer(int *can, int one, int other) { *can = one != other && !peers("none"); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxSetCurrent(void *context) { current = (int)((int *)context - contexts); return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxEnablePeerAccess(void *context, unsigned flags) { (void)context; (void)flags; return peers("none") ? PEER_UNSUPPORTED : 0; }
int cuCtxDisablePeerAccess(void *context) { (void)context; return 0; }

static int map(uint64_t *address, const char *name, size_t bytes, int flags) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("FAKE_MEMORY"), name);
    int file = open(path, O_RDWR | flags, 0600);
    if (file < 0) return INVALID;
    if (bytes == 0) bytes = (size_t)lseek(file, 0, SEEK_END);
    else if (ftruncate(file, (off_t)bytes)) return INVALID;
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    for (int i = 0; i < MOST; i++) {
        if (blocks[i].base) continue;
        blocks[i] = (Block){base, bytes, current, ""};
        snprintf(blocks[i].name, BYTES_OF_IPC, "%s", name);
        *address = (uint64_t)base;
        return 0;
    }
    return INVALID;
}
static Block *block(uint64_t address) {
    for (int i = 0; i < MOST; i++) if (blocks[i].base && (uint64_t)blocks[i].base == address) return &blocks[i];
    return NULL;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    char name[BYTES_OF_IPC];
    snprintf(name, sizeof name, "%d-%d", getpid(), serial++);
    return map(address, name, bytes, O_CREAT);
}
int cuMemFree_v2(uint64_t address) {
    Block *b = block(address);
    if (!b) return INVALID;
    munmap(b->base, b->bytes);
    b->base = NULL;
    return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return block(from) ? 0 : INVALID; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return block(to) ? 0 : INVALID; }
int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    Block *b = block(address);
    if (!b) return INVALID;
    memcpy(handle->name, b->name, BYTES_OF_IPC);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) { (void)flags; return map(address, handle.name, 0, 0); }
int cuIpcCloseMemHandle(uint64_t address) { return cuMemFree_v2(address); }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return strstr(image, ".entry") ? 0 : INVALID; }
int cuModuleUnload(void *module) { (void)module; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    char entry[64];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    *function = strstr(module, entry);
    return *function ? 0 : INVALID;
}
/* what the PTX of probe.rs does */
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    (void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    uint64_t address = *(uint64_t *)parameters[0], result = *(uint64_t *)parameters[3];
    uint32_t count = *(uint32_t *)parameters[1], seed = *(uint32_t *)parameters[2];
    Block *b = block(address);
    if (!b || gx * bx < count || b->bytes < 4ull * count) return INVALID;
    int lost = peers("lies") && b->device != current;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t value = i * 2654435761u ^ seed, *at = (uint32_t *)address + i;
        if (strncmp(function, ".entry write", 12) == 0) { if (!lost) *at = value; }
        else if (*at != value) ++*(uint32_t *)result;
    }
    return 0;
}
/* NVRTC's and NCCL's, for libraries of theirs made of this same file */
int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 2; return 0; }
int ncclGetVersion(int *version) { *version = 22907; return 0; }
