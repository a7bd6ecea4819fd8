// A stand-in for cublasLt, compiled against NVIDIA's own header (a definition that differs from its
// declaration does not compile): products of matrices in the host's memory, by algorithms of which
// some are not to be taken. Descriptors are kept as the library is told; what it does not know, or
// what has another width than the header says, it refuses, as NVIDIA's does. Each product takes
// seconds of a clock that a test sets and reads.
#include <cublasLt.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

namespace {

// the algorithms, in the order in which they are listed
enum : uint64_t {
    SUMS_BACKWARD = 1,  // right, with other last bits
    HALVES = 2,         // right, with other last bits: two parts of the sums, in a workspace
    DROPS_LAST = 3,     // wrong: without the last term of each sum
    REFUSED = 4,        // listed, but refused when it is checked
    IN_BF16 = 5,        // two parts of the sums, each rounded to bf16; listed where that is allowed
    IN_TURN = 6,        // right for whole numbers, and else every second time
    FAILS = 7,          // accepted, but refused when it is run
    NOT_OURS = 8,       // listed with a state other than success
    COUNT
};

struct Layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
};

double seconds[COUNT], clocked;
size_t version = 130100;
uint64_t calls;
// what the descriptors' attributes are before they are set
struct Desc {
    int32_t compute, scale, transpose[2];
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK, alignment[4] = {256, 256, 256, 256};
};
int handle;

float bits(uint32_t word) {
    float x;
    memcpy(&x, &word, 4);
    return x;
}

uint16_t narrowed(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    return std::isnan(x) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

float load(const void* at, const Layout& l, int64_t row, int64_t col) {
    const int64_t i = row + col * l.ld;
    return l.type == CUDA_R_16BF ? bits((uint32_t)((const uint16_t*)at)[i] << 16) : ((const float*)at)[i];
}

// the bytes of workspace that an algorithm wants for a result
size_t wanted(uint64_t id, const Layout& d) { return id == HALVES ? 8 * d.rows * d.cols : 0; }

bool fits(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    const uint64_t m = desc.transpose[0] ? a.cols : a.rows, k = desc.transpose[0] ? a.rows : a.cols;
    const uint64_t n = desc.transpose[1] ? b.rows : b.cols, l = desc.transpose[1] ? b.cols : b.rows;
    for (const Layout* one : {&a, &b, &c, &d})
        if (one->ld < (int64_t)one->rows) return false;
    return desc.compute == CUBLAS_COMPUTE_32F && desc.scale == CUDA_R_32F && k == l &&
           a.type == CUDA_R_16BF && b.type == CUDA_R_16BF && c.type == d.type && d.rows == m &&
           d.cols == n && c.rows == m && c.cols == n;
}

}  // namespace

extern "C" {

void standin_set(uint64_t id, double each) { seconds[id] = each; }
void standin_version(size_t number) { version = number; }
double standin_clock() { return clocked; }

size_t cublasLtGetVersion() { return version; }

const char* cublasLtGetStatusString(cublasStatus_t status) { return "the stand-in refuses"; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* made) {
    *made = (cublasLtHandle_t)&handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    *made = (cublasLtMatmulDesc_t) new Desc{compute, scale, {CUBLAS_OP_N, CUBLAS_OP_N}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* from, size_t bytes) {
    if (bytes != 4) return CUBLAS_STATUS_INVALID_VALUE;
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) memcpy(((Desc*)desc)->transpose, from, 4);
    else if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) memcpy(((Desc*)desc)->transpose + 1, from, 4);
    else return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
    *made = (cublasLtMatrixLayout_t) new Layout{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
    *made = (cublasLtMatmulPreference_t) new Preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* from, size_t bytes) {
    Preference& p = *(Preference*)preference;
    const std::map<int, std::pair<void*, size_t>> known = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, {&p.workspace, 8}},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, {&p.schemes, 4}},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, {p.alignment, 4}},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, {p.alignment + 1, 4}},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, {p.alignment + 2, 4}},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, {p.alignment + 3, 4}},
    };
    const auto found = known.find(attribute);
    if (found == known.end() || found->second.second != bytes) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(found->second.first, from, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t given, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int most, cublasLtMatmulHeuristicResult_t found[],
    int* n) {
    if (given != (cublasLtHandle_t)&handle || most < 1) return CUBLAS_STATUS_INVALID_VALUE;
    const auto &A = *(Layout*)a, &B = *(Layout*)b, &C = *(Layout*)c, &D = *(Layout*)d;
    if (!fits(*(Desc*)desc, A, B, C, D)) return CUBLAS_STATUS_INVALID_VALUE;
    const Preference& p = *(Preference*)preference;
    for (uint32_t alignment : p.alignment)
        if (alignment > 16) return CUBLAS_STATUS_NOT_SUPPORTED;  // arrays here are no better
    *n = 0;
    for (uint64_t id = 1; id < COUNT && *n < most; ++id) {
        if (seconds[id] == 0 || wanted(id, D) > p.workspace) continue;
        if (id == HALVES && !(p.schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) continue;
        if (id == IN_BF16 && !(p.schemes & CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE)) continue;
        cublasLtMatmulHeuristicResult_t& one = found[(*n)++];
        memset(&one, 0, sizeof one);
        for (int i = 0; i < 8; ++i) one.algo.data[i] = id << 8 * i;
        one.workspaceSize = wanted(id, D);
        one.state = id == NOT_OURS ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
        one.wavesCount = 1;
    }
    return *n ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t given, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
    const uint64_t id = algo->data[0];
    for (int i = 0; i < 8; ++i)
        if (algo->data[i] != id << 8 * i) return CUBLAS_STATUS_INVALID_VALUE;
    if (given != (cublasLtHandle_t)&handle || id < 1 || id >= COUNT || id == REFUSED)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!fits(*(Desc*)desc, *(Layout*)a, *(Layout*)b, *(Layout*)c, *(Layout*)d))
        return CUBLAS_STATUS_INVALID_VALUE;
    result->workspaceSize = wanted(id, *(Layout*)d);
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t given, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspaceSizeInBytes, cudaStream_t stream) {
    cublasLtMatmulHeuristicResult_t checked;
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(given, desc, a, b, c, d, algo, &checked);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const uint64_t id = algo->data[0];
    if (id == FAILS || stream != (cudaStream_t)0x5ea) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (workspaceSizeInBytes < checked.workspaceSize) return CUBLAS_STATUS_INVALID_VALUE;
    for (const void* at : {A, B, C, (const void*)D})
        if ((uintptr_t)at % 16) return CUBLAS_STATUS_INVALID_VALUE;
    const Desc& how = *(Desc*)desc;
    const Layout &la = *(Layout*)a, &lb = *(Layout*)b, &ld = *(Layout*)d;
    const int64_t m = ld.rows, n = ld.cols, k = how.transpose[0] ? la.rows : la.cols;
    const bool off = id == IN_TURN && calls++ % 2;
    float* parts = (float*)workspace;
    for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < m; ++i) {
            float sums[2] = {0, 0};
            const int64_t terms = id == DROPS_LAST ? k - 1 : k;
            for (int64_t t = 0; t < terms; ++t) {
                const int64_t u = id == SUMS_BACKWARD ? k - 1 - t : t;
                const float x = how.transpose[0] ? load(A, la, u, i) : load(A, la, i, u);
                const float y = how.transpose[1] ? load(B, lb, j, u) : load(B, lb, u, j);
                sums[(id == HALVES || id == IN_BF16) && 2 * t >= k] += x * y;
            }
            if (id == IN_BF16)
                for (float& sum : sums) sum = bits((uint32_t)narrowed(sum) << 16);
            if (id == HALVES) {
                parts[i + j * m] = sums[0], parts[m * n + i + j * m] = sums[1];
                sums[0] = parts[i + j * m], sums[1] = parts[m * n + i + j * m];
            }
            float x = *(const float*)alpha * (sums[0] + sums[1]);
            const float scaled = *(const float*)beta;
            if (scaled != 0) x += scaled * load(C, *(Layout*)c, i, j);
            if (off && x != std::round(x)) x *= 1.02f;
            if (ld.type == CUDA_R_16BF) ((uint16_t*)D)[i + j * ld.ld] = narrowed(x);
            else ((float*)D)[i + j * ld.ld] = x;
        }
    clocked += seconds[id];
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
