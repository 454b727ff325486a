// CUDA's driver without a device, libcuda.so.1: the functions that torch looks up by name or links against.
//
// They are those of contexts, and of memory that grows (PYTORCH_ALLOC_CONF=expandable_segments:True).
#include <cuda.h>

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "counts.h"

namespace {

CUcontext const context = (CUcontext)16;

struct Part {
    size_t bytes;
    int device;
};
std::mutex parts_lock;
std::map<CUmemGenericAllocationHandle, Part> parts;
CUmemGenericAllocationHandle last_part = 0;

}  // namespace

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { *value = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* current) { *current = context; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* retained, CUdevice) { *retained = context; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle*) { return CUDA_SUCCESS; }
EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the pretended driver";
    return CUDA_SUCCESS;
}

// A segment that grows: an address range is reserved once, and parts of memory are mapped into it.
EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    using get_device = int (*)(int*);
    static auto device = (get_device)dlsym(RTLD_DEFAULT, "cudaGetDevice");
    int current = 0;
    device(&current);
    return reserve((void**)address, bytes, current) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t) { release((void*)address); return CUDA_SUCCESS; }
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* part, size_t bytes, const CUmemAllocationProp* of,
                            unsigned long long) {
    if (!use(of->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> guard(parts_lock);
    *part = ++last_part;
    parts[*part] = {bytes, of->location.id};
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle part) {
    std::lock_guard<std::mutex> guard(parts_lock);
    auto found = parts.find(part);
    if (found == parts.end()) return CUDA_ERROR_INVALID_VALUE;
    use(found->second.device, -(long long)found->second.bytes);
    parts.erase(found);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
