// cuBLAS without a device: handles, and products of matrices that are counted. It is a part of the preloaded library.
//
// The headers of cuBLAS need parts of nvcc; its functions take pointers, numbers and enumerations, and return 0.
#include <cstring>

#include "counts.h"

namespace {

size_t last = 0x1000;

int make(void** handle) {
    *handle = (void*)(last += 16);
    return 0;
}

int product() {
    counts[PRODUCTS]++;
    return 0;
}

// cublasLtMatmulHeuristicResult_t: an algorithm of 64 bytes, its workspace and state; 0 is success
struct Heuristic {
    unsigned long long algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

}  // namespace

#define DOES_NOTHING(name) EXPORT int name() { return 0; }
#define IS_A_PRODUCT(name) EXPORT int name() { return product(); }

EXPORT int cublasCreate_v2(void** handle) { return make(handle); }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }  // scalars are on the host
EXPORT int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
DOES_NOTHING(cublasDestroy_v2)
DOES_NOTHING(cublasSetPointerMode_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetStream_v2)
DOES_NOTHING(cublasSetWorkspace_v2)

IS_A_PRODUCT(cublasSgemm_v2)
IS_A_PRODUCT(cublasDgemm_v2)
IS_A_PRODUCT(cublasSgemmEx)
IS_A_PRODUCT(cublasGemmEx)
IS_A_PRODUCT(cublasSgemmStridedBatched)
IS_A_PRODUCT(cublasDgemmStridedBatched)
IS_A_PRODUCT(cublasGemmStridedBatchedEx)
IS_A_PRODUCT(cublasSgemv_v2)
IS_A_PRODUCT(cublasDgemv_v2)
IS_A_PRODUCT(cublasSdot_v2)
IS_A_PRODUCT(cublasDdot_v2)

EXPORT size_t cublasLtGetVersion() { return 130000; }
EXPORT int cublasLtMatmulDescCreate(void** made, int, int) { return make(made); }
EXPORT int cublasLtMatrixLayoutCreate(void** made, int, unsigned long long, unsigned long long, long long) {
    return make(made);
}
EXPORT int cublasLtMatmulPreferenceCreate(void** made) { return make(made); }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* results,
                                          int* found) {
    memset(results, 0, sizeof *results);
    *found = 1;
    return 0;
}
DOES_NOTHING(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutDestroy)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute)
DOES_NOTHING(cublasLtMatmulPreferenceDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
IS_A_PRODUCT(cublasLtMatmul)
