// NVIDIA's management library without a device, libnvidia-ml.so.1: torch counts devices with it.
//
// torch's allocator also looks for a fabric between devices before it maps memory that grows: there is none.
#include <cstdlib>

#include "counts.h"

constexpr int NOT_SUPPORTED = 3;

EXPORT int nvmlInit() { return 0; }
EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlDeviceGetCount_v2(unsigned* number) {
    const char* devices = getenv("PRETEND_CUDA_DEVICES");
    *number = devices ? atoi(devices) : 1;
    return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { *device = (void*)16; return 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = (void*)16; return 0; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetComputeRunningProcesses() { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3() { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV() { return 0; }  // of state 0: no fabric
