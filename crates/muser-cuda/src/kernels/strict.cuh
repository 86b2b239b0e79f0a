// The strict lane: muser_core::strict, operation by operation. What includes this is compiled without contraction (-fmad=false), with
// IEEE division and roots and with denormals, so that every result has the reference's bits.

// Sum of a warp's lanes, pairwise at distances 16, 8, 4, 2, 1; every lane gets it.
__device__ __forceinline__ float fold(float v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
    return __shfl_sync(0xffffffffu, v, 0);
}
__device__ __forceinline__ float strict_exp(float x) {
    if (x != x) return x;
    if (x > 88.72283f) return __uint_as_float(0x7f800000);
    if (x < -87.33654f) return 0.0f;
    float n = __fmaf_rn(x, 1.44269504088896340736f, 12582912.0f) - 12582912.0f;
    float r = __fmaf_rn(n, -1.4286068e-6f, __fmaf_rn(n, -0.69314575f, x));
    float p = 1.0f / 720.0f;
    p = __fmaf_rn(p, r, 1.0f / 120.0f);
    p = __fmaf_rn(p, r, 1.0f / 24.0f);
    p = __fmaf_rn(p, r, 1.0f / 6.0f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    int half = (int)n >> 1;
    return p * __uint_as_float((u32)(half + 127) << 23) * __uint_as_float((u32)((int)n - half + 127) << 23);
}
__device__ __forceinline__ float strict_tanh(float x) {
    float e = strict_exp(-2.0f * fabsf(x));
    return copysignf((1.0f - e) / (1.0f + e), x);
}
// 1 / sqrt(mean of squares + eps), a lane's part of the squares summed.
__device__ __forceinline__ float factor_of(float acc, u32 n, float eps) { return 1.0f / __fsqrt_rn(fold(acc) / (float)n + eps); }

extern __shared__ uint4 shared_bytes[];
// The same of a row in shared memory, for a whole block: its first warp sums, and leaves the factor there too. Behind the row's n
// floats stand zeros up to a multiple of SUM_STEP, whose squares change no sum.
#define SUM_STEP 512
__device__ __forceinline__ float block_factor(const float* x, u32 n, float eps, float* result) {
    __syncthreads();
    if (threadIdx.x < 32) {
        float acc = 0.0f;
        for (u32 i = threadIdx.x; i < n; i += SUM_STEP) {
            float v[16];
#pragma unroll
            for (int k = 0; k < 16; ++k) v[k] = x[i + 32 * k];
#pragma unroll
            for (int k = 0; k < 16; ++k) acc = __fmaf_rn(v[k], v[k], acc);
        }
        acc = factor_of(acc, n, eps);
        if (threadIdx.x == 0) *result = acc;
    }
    __syncthreads();
    return *result;
}
