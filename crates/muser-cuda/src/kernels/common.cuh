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

// A value that the compiler keeps in its register instead of computing it again.
__device__ __forceinline__ u32 keep(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

// Two halves in a register.
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 hadd2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 twice_low(u32 a) { return __byte_perm(a, a, 0x1010); }
__device__ __forceinline__ u32 twice_high(u32 a) { return __byte_perm(a, a, 0x3232); }

// c (16 x 8, f32) += a (16 x 16, f16) * b (16 x 8, f16).
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An activation as products and observers take it.
struct Activation {
    float* f;
    u16* h;
};

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
