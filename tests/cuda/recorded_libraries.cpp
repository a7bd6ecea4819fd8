// The functions of cuBLAS and NCCL that a launcher or the trainer calls, as NVIDIA's headers declare
// them (a definition that differs from its declaration does not compile). Loaded in the libraries'
// place, NCCL's by LD_PRELOAD, each writes its arguments into the file $MYLLM_CALLS, and does nothing.
#include <cublas_v2.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

static FILE* record() {
    static FILE* file = fopen(getenv("MYLLM_CALLS"), "w");
    return file;
}

template <class... Arguments> static void note(const char* name, Arguments... arguments) {
    FILE* file = record();
    fprintf(file, "%s", name);
    (fprintf(file, " %lld", (long long)arguments), ...);
    fputc('\n', file);
    fflush(file);
}

__attribute__((constructor)) static void constants() {
    note("cudaDataType", CUDA_R_32F, CUDA_R_16BF);
    note("cublasOperation_t", CUBLAS_OP_N, CUBLAS_OP_T);
    note("cublasComputeType_t", CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC);
    note("cublasGemmAlgo_t", CUBLAS_GEMM_DEFAULT);
    note("cublasMath_t", CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    note("ncclDataType_t", ncclFloat32);
    note("ncclUniqueId", sizeof(ncclUniqueId));
}

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
    *handle = (cublasHandle_t)0x7fff12345678LL;
    return CUBLAS_STATUS_SUCCESS;
}

const char* cublasGetStatusString(cublasStatus_t status) { return "out of memory, say"; }

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t streamId) {
    note("cublasSetStream", handle, streamId);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace,
                                     size_t workspaceSizeInBytes) {
    note("cublasSetWorkspace", handle, workspace, workspaceSizeInBytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                            cublasOperation_t transb, int m, int n, int k, const void* alpha,
                            const void* A, cudaDataType Atype, int lda, const void* B,
                            cudaDataType Btype, int ldb, const void* beta, void* C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t computeType,
                            cublasGemmAlgo_t algo) {
    note("cublasGemmEx", handle, transa, transb, m, n, k, *(const float*)alpha, A, Atype, lda, B,
         Btype, ldb, *(const float*)beta, C, Ctype, ldc, computeType, algo);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    note("cublasSetMathMode", handle, mode);
    return CUBLAS_STATUS_SUCCESS;
}

ncclResult_t ncclGetVersion(int* version) {
    *version = 23456;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    for (size_t i = 0; i < sizeof *id; ++i) id->internal[i] = (char)(i + 1);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    ncclUniqueId whole;
    ncclGetUniqueId(&whole);
    note("ncclCommInitRankConfig", nranks, memcmp(&id, &whole, sizeof id) == 0, rank, config != nullptr);
    *comm = (ncclComm_t)0x123456789abcLL;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }

ncclResult_t ncclGroupStart() {
    note("ncclGroupStart");
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    note("ncclGroupEnd");
    return ncclSuccess;
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    note("ncclSend", sendbuff, count, datatype, peer, comm, stream);
    return ncclSuccess;
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    note("ncclRecv", recvbuff, count, datatype, peer, comm, stream);
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) { return "out of memory, say"; }

}  // extern "C"
