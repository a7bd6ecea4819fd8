// The functions of cuBLAS and NCCL that a launcher or the trainer calls, as NVIDIA's headers declare
// them (a definition that differs from its declaration does not compile). Put before the libraries
// by LD_PRELOAD, each writes its arguments into the file $MYLLM_CALLS, and does nothing.
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
    note("cublasPointerMode_t", CUBLAS_POINTER_MODE_HOST);
    note("cublasMath_t", CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    note("ncclDataType_t", ncclFloat32);
    note("ncclUniqueId", sizeof(ncclUniqueId));
}

extern "C" {

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
    note("cublasSetPointerMode", handle, mode);
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
