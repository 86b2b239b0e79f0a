// What every kernel shares: rows, reductions, planes of partial sums.

// One row of a batch; `upload_rows` in device.rs writes it.
struct Row {
    u32 token, pos, slot, feature;
    int logit;   // index among the rows that ask for logits, or -1
    u32 end, begin;   // last and first position of the row's sequence in this batch
    u32 pad;
};

__device__ __forceinline__ u32 floats_to_half2(float lo, float hi) {
    return (u32)float_to_half(lo) | ((u32)float_to_half(hi) << 16);
}
__device__ __forceinline__ float bf16_to_float(u16 b) { return __uint_as_float((u32)b << 16); }
__device__ __forceinline__ float4 floats(uint4 w) { return make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)); }

__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}
// Sum over a block of at most 1024 threads; `shared` holds 33 floats.
__device__ __forceinline__ float block_sum(float v, float* shared) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
    v = warp_sum(v);
    if (lane == 0) shared[warp] = v;
    __syncthreads();
    float total = lane < warps ? shared[lane] : 0.0f;
    total = warp_sum(total);
    __syncthreads();
    return total;
}

__device__ __forceinline__ u32 twice_low(u32 a) { return __byte_perm(a, a, 0x1010); }
__device__ __forceinline__ u32 twice_high(u32 a) { return __byte_perm(a, a, 0x3232); }

// An activation as products and observers take it; without f32 (null) where many rows pass.
struct Activation {
    float* f;
    u16* h;
};

// What a product on many rows leaves: f16, rows `stride` elements apart.
struct Halves {
    const u16* p;
    u64 stride;
};
// Two of them as floats; what became infinite on its way is the largest f16.
__device__ __forceinline__ float2 two_halves(u32 w) {
    float a = half_to_float((u16)w), b = half_to_float((u16)(w >> 16));
    return make_float2(fminf(fmaxf(a, -65504.0f), 65504.0f), fminf(fmaxf(b, -65504.0f), 65504.0f));
}

// What a product on a few rows leaves: `count` planes, `stride` elements apart, whose sum is the result.
struct Planes {
    const float* p;
    u64 stride;
    int count, pad;
};
__device__ __forceinline__ float sum_planes(const Planes& a, u64 at) {
    float v = a.p[at];
    for (int i = 1; i < a.count; ++i) v += a.p[at + i * a.stride];
    return v;
}
