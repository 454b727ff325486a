// CUDA's runtime without a device: it takes the place of libcudart by LD_PRELOAD.
//
// Device memory is memory of the host, which the kernel gives when it is first touched. Copies are done at once, streams
// and events do nothing but count, and kernels are not run: cpu_kernels.cpp computes in their place, if it is loaded.
// Functions that torch does not need for training are made by build.py: they print their name and abort.
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "counts.h"

std::atomic<long long> counts[NUMBER_OF_COUNTS];

namespace {

constexpr int MOST_DEVICES = 16;
constexpr size_t TOTAL = 80ull << 30;  // bytes of each device: an H100's
constexpr int HOST = -1;               // in place of a device's number: pinned memory
constexpr int UNKNOWN = -2;

struct Piece {
    size_t bytes;
    int device;
    bool owned;  // mapped here, to be unmapped here
};

std::mutex lock;
std::map<char*, Piece> pieces;
size_t used[MOST_DEVICES];
std::atomic<size_t> handles{0x1000};
thread_local int current = 0;

int number_of_devices() {
    const char* devices = getenv("PRETEND_CUDA_DEVICES");
    int number = devices ? atoi(devices) : 1;
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");  // a list of numbers
    if (!visible) return number;
    return *visible ? std::min<int>(number, 1 + std::count(visible, visible + strlen(visible), ',')) : 0;
}

// Returns the device of an address; HOST if it is pinned, UNKNOWN if it is ordinary memory.
int device_of(const void* address) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = pieces.upper_bound((char*)address);
    if (found == pieces.begin()) return UNKNOWN;
    --found;
    return (char*)address < found->first + found->second.bytes ? found->second.device : UNKNOWN;
}

bool map(void** address, size_t bytes, int device) {
    bytes = bytes ? bytes : 1;
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    std::lock_guard<std::mutex> guard(lock);
    pieces[(char*)found] = {bytes, device, true};
    *address = found;
    return true;
}

// Returns the size of a piece that is given up; 0 for an unknown one.
size_t unmap(void* address, int* device = nullptr) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = pieces.find((char*)address);
    if (found == pieces.end()) return 0;
    size_t bytes = found->second.bytes;
    if (device) *device = found->second.device;
    if (found->second.owned) munmap(address, bytes);
    pieces.erase(found);
    return bytes;
}

template <class T>
cudaError_t make(T* handle) {
    *handle = (T)(handles += 16);
    return cudaSuccess;
}

// Writes the names of kernels to the file PRETEND_CUDA_TRACE, if there is one: which launches are too many?
std::map<const void*, const char*> kernels;
FILE* trace() {
    static FILE* file = getenv("PRETEND_CUDA_TRACE") ? fopen(getenv("PRETEND_CUDA_TRACE"), "a") : nullptr;
    return file;
}

cudaError_t launched(const void* kernel) {
    counts[LAUNCHES]++;
    if (trace()) {
        auto found = kernels.find(kernel);
        fprintf(trace(), "%lld %s\n", counts[LAUNCHES].load(), found == kernels.end() ? "?" : found->second);
        fflush(trace());
    }
    return cudaSuccess;
}

// A device that hangs: events that are recorded from now on stay unfinished, and a wait for the whole device has no end.
// Other waits end, because gloo in the place of NCCL makes the host wait where NCCL does not.
std::atomic<bool> hung{false};
std::set<cudaEvent_t> unfinished;

cudaError_t waited() {
    counts[WAITS]++;
    return cudaSuccess;
}

cudaError_t recorded(cudaEvent_t event) {
    counts[EVENTS]++;
    if (hung) {
        std::lock_guard<std::mutex> guard(lock);
        unfinished.insert(event);
    }
    return cudaSuccess;
}

// Copies at once. CUDA's driver makes the host wait for a copy from or to memory that is not pinned.
void copy(void* to, const void* from, size_t bytes) {
    int target = device_of(to), source = device_of(from);
    counts[target >= 0 && source >= 0 ? ON_DEVICE : target >= 0 ? TO_DEVICE : TO_HOST]++;
    if (target == UNKNOWN || source == UNKNOWN) counts[UNPINNED]++;
    memmove(to, from, bytes);
}

}  // namespace

bool reserve(void** address, size_t bytes, int device) { return map(address, bytes, device); }
void release(void* address) { unmap(address); }
bool use(int device, long long bytes) {
    std::lock_guard<std::mutex> guard(lock);
    if (bytes > 0 && used[device] + bytes > TOTAL) return false;
    used[device] += bytes;
    if (bytes > 0) counts[SEGMENTS]++;
    return true;
}

// Copies the counts since the start of the process into `out`, of NUMBER_OF_COUNTS numbers.
EXPORT void pretend_cuda_counts(long long* out) {
    for (int i = 0; i < NUMBER_OF_COUNTS; i++) out[i] = counts[i];
}

// Adds one to the collectives: NCCL's calls are replaced by collectives.cpp, another library.
EXPORT void pretend_cuda_collective() { counts[COLLECTIVES]++; }

// Makes the devices of this process hang.
EXPORT void pretend_cuda_hang() { hung = true; }

// Devices
EXPORT cudaError_t cudaGetDeviceCount(int* number) {
    *number = number_of_devices();
    return *number ? cudaSuccess : cudaErrorNoDevice;
}
EXPORT cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= number_of_devices()) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
    memset(of, 0, sizeof *of);
    strcpy(of->name, "pretended H100");
    memset(of->uuid.bytes, 17 + device, sizeof of->uuid.bytes);
    of->major = 9;
    of->totalGlobalMem = TOTAL;
    of->multiProcessorCount = 132;
    of->warpSize = 32;
    of->maxThreadsPerBlock = 1024;
    of->maxThreadsPerMultiProcessor = 2048;
    of->maxBlocksPerMultiProcessor = 32;
    of->sharedMemPerBlock = 48 << 10;
    of->sharedMemPerBlockOptin = 227 << 10;
    of->sharedMemPerMultiprocessor = 228 << 10;
    of->regsPerBlock = of->regsPerMultiprocessor = 65536;
    of->l2CacheSize = 50 << 20;
    of->textureAlignment = 512;
    of->maxGridSize[0] = 2147483647;
    of->maxGridSize[1] = of->maxGridSize[2] = 65535;
    of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
    of->maxThreadsDim[2] = 64;
    of->unifiedAddressing = of->canMapHostMemory = 1;
    of->pciBusID = device + 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
    cudaDeviceProp of;
    cudaGetDeviceProperties(&of, device);
    switch (which) {
        case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
        case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = of.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = of.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = of.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = of.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = of.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxGridDimX: *value = of.maxGridSize[0]; break;
        case cudaDevAttrWarpSize: *value = of.warpSize; break;
        case cudaDevAttrL2CacheSize: *value = of.l2CacheSize; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
    while (hung) sleep(1);
    return waited();
}
EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the pretended device";
}
EXPORT const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorPretended";
}

// Memory
EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) {
    if (!use(current, bytes)) return cudaErrorMemoryAllocation;
    if (map(address, bytes, current)) return cudaSuccess;
    use(current, -(long long)bytes);
    return cudaErrorMemoryAllocation;
}
EXPORT cudaError_t cudaFree(void* address) {
    int device = UNKNOWN;
    size_t bytes = unmap(address, &device);
    if (device >= 0) use(device, -(long long)bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> guard(lock);
    *free = TOTAL - used[current];
    *total = TOTAL;
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    counts[PINNED]++;
    return map(address, bytes, HOST) ? cudaSuccess : cudaErrorMemoryAllocation;
}
EXPORT cudaError_t cudaFreeHost(void* address) { unmap(address); return cudaSuccess; }
EXPORT cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    counts[PINNED]++;
    counts[REGISTERED]++;
    std::lock_guard<std::mutex> guard(lock);
    return pieces.insert({(char*)address, {bytes, HOST, false}}).second ? cudaSuccess
                                                                        : cudaErrorHostMemoryAlreadyRegistered;
}
EXPORT cudaError_t cudaHostUnregister(void* address) {
    return unmap(address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* address) {
    memset(of, 0, sizeof *of);
    int device = device_of(address);
    of->device = device >= 0 ? device : 0;
    of->type = device >= 0      ? cudaMemoryTypeDevice
               : device == HOST ? cudaMemoryTypeHost
                                : cudaMemoryTypeUnregistered;
    if (device >= HOST) of->devicePointer = (void*)address;
    if (device == HOST) of->hostPointer = (void*)address;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    copy(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    copy(to, from, bytes);
    return waited();
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
    copy(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; row < height; row++) memmove((char*)to + row * to_pitch, (char*)from + row * from_pitch, width);
    counts[device_of(to) < 0 ? TO_HOST : device_of(from) < 0 ? TO_DEVICE : ON_DEVICE]++;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
    counts[FILLS]++;
    // Pages that nobody touched are zero: gigabytes of zeros would become real memory.
    if (value || bytes < (1 << 20) || getenv("PRETEND_CUDA_KERNELS")) memset(address, value, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* address, int value, size_t bytes) {
    return cudaMemsetAsync(address, value, bytes, nullptr);
}

// Streams and events. Work is done when it is issued: everything that is asked for has happened.
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return waited(); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    counts[STREAM_WAITS]++;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { return recorded(event); }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) { return recorded(event); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::mutex> guard(lock);
    return unfinished.count(event) ? cudaErrorNotReady : cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return waited(); }
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 0; return cudaSuccess; }

// Kernels
EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launched(kernel);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launched(kernel);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
    return launched(kernel);
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
    memset(of, 0, sizeof *of);
    of->maxThreadsPerBlock = 1024;
    of->numRegs = 32;
    of->maxDynamicSharedSizeBytes = 227 << 10;
    of->binaryVersion = of->ptxVersion = 90;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
    *blocks = 8;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char room[1 << 20];  // kernels, which would read it, are not run
    *address = room;
    return cudaSuccess;
}

// What nvcc's code calls when a library is loaded and before a launch
namespace {
thread_local struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configuration;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
    configuration = {grid, block, shared, stream};
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t*)stream = configuration.stream;
    return cudaSuccess;
}
EXPORT void** __cudaRegisterFatBinary(void*) { return (void**)(handles += 16); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
    if (trace()) kernels[kernel] = name;
}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 1; }

// The driver's functions, which torch looks up by name for expandable segments: driver.cpp has them.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : nullptr;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorNotSupported;
}
