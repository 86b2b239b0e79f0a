// What every kernel shares: scalar types without any include, half conversions, reductions, programmatic launch.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

// One row of a batch; mirrors RowMeta in program.rs.
struct Row {
    u32 token, pos, slot, feature;
    int logit;   // index among the rows that ask for logits, or -1
    u32 end;     // last position of the row's sequence in this batch
    u32 pad0, pad1;
};

__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
// Rounds to nearest even; what is beyond f16 becomes its largest value.
__device__ __forceinline__ u16 float_to_half(float f) {
    u16 h;
    f = fminf(fmaxf(f, -65504.0f), 65504.0f);
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ u32 floats_to_half2(float lo, float hi) {
    return (u32)float_to_half(lo) | ((u32)float_to_half(hi) << 16);
}
__device__ __forceinline__ float bf16_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

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

// Programmatic dependent launch: the next kernel may start; wait until the kernels before are complete.
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Activations of a matrix product: f32, and the same row as int8 in groups of 32 with a scale, and sums of 16 times that scale.
struct Activation {
    float* f;
    i8* q;
    float* d;
    float* s;
    u16* h;   // f16, for products on many rows
};

// 32 lanes hold 32 neighbouring values, element `at` of the row first: quantises them to int8.
__device__ __forceinline__ void quantize32(float v, u64 at, int lane, const Activation& out) {
    float amax = warp_max(fabsf(v));
    float d = amax / 127.0f;
    int q = amax > 0.0f ? __float2int_rn(v * (127.0f / amax)) : 0;
    out.q[at + lane] = (i8)q;
    int sum = q;
#pragma unroll
    for (int w = 8; w > 0; w >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, w);
    if ((lane & 15) == 0) out.s[(at + lane) >> 4] = d * (float)sum;
    if (lane == 0) out.d[at >> 5] = d;
}
