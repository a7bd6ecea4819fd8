// Prints what NVIDIA's header says of what accel/cuda/cublaslt.py binds: a line each, of FUNCTIONS
// the widths of what they return and take, of structures their size, of constants their number.
#include <cublasLt.h>

#include <cstddef>
#include <cstdio>
#include <type_traits>

template <class T> static void width() {
    if constexpr (std::is_pointer_v<T>) printf(" pointer");
    else if constexpr (std::is_enum_v<T>) printf(" %zu", sizeof(T));  // of no sign that matters
    else printf(" %zu%s", sizeof(T), std::is_unsigned_v<T> ? "u" : "");
}

template <class R, class... A> static void one(const char* name, R (*)(A...)) {
    printf("%s", name);
    width<R>();
    (width<A>(), ...);
    printf("\n");
}

// the names as one text, to be cut at commas
#define TEXT(...) #__VA_ARGS__
#define NAMES(...) TEXT(__VA_ARGS__)
static const char* names = NAMES(FUNCTIONS);

template <class... F> static void all(F... functions) {
    auto next = [] {
        static char name[80];
        size_t n = 0;
        while (*names == ',' || *names == ' ') ++names;
        while (*names && *names != ',') name[n++] = *names++;
        name[n] = 0;
        return name;
    };
    (one(next(), functions), ...);
}

#define SHOW(number) printf(#number " %lld\n", (long long)(number))

int main() {
    all(FUNCTIONS);
    printf("cublasLtMatmulAlgo_t %zu\n", sizeof(cublasLtMatmulAlgo_t));
    printf("cublasLtMatmulHeuristicResult_t %zu\n", sizeof(cublasLtMatmulHeuristicResult_t));
    printf("offset.algo %zu\n", offsetof(cublasLtMatmulHeuristicResult_t, algo));
    printf("offset.workspace %zu\n", offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
    printf("offset.state %zu\n", offsetof(cublasLtMatmulHeuristicResult_t, state));
    printf("offset.waves %zu\n", offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));
    printf("offset.reserved %zu\n", offsetof(cublasLtMatmulHeuristicResult_t, reserved));
    SHOW(CUDA_R_32F), SHOW(CUDA_R_16BF), SHOW(CUBLAS_COMPUTE_32F);
    SHOW(CUBLAS_OP_N), SHOW(CUBLAS_OP_T), SHOW(CUBLAS_STATUS_SUCCESS);
    SHOW(CUBLAS_STATUS_NOT_SUPPORTED);
    SHOW(CUBLASLT_POINTER_MODE_HOST), SHOW(CUBLASLT_ORDER_COL);
    SHOW(CUBLASLT_MATMUL_DESC_TRANSA), SHOW(CUBLASLT_MATMUL_DESC_TRANSB);
    SHOW(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES), SHOW(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
    SHOW(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES), SHOW(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
    SHOW(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES), SHOW(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
    SHOW(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}
