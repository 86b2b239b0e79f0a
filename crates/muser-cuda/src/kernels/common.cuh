// What every kernel shares: rows, reductions, planes of partial sums.

// One row of a batch; `upload_rows` in device.rs writes it.
struct Row {
    u32 token, pos, slot, feature;
    int logit;   // index among the rows that ask for logits, or -1
    u32 end, begin;   // last and first position of the row's sequence in this batch
    u32 block;   // of row b: the first row of block b of rows that read keys together, up to eight of a sequence
};

__device__ __forceinline__ u32 floats_to_half2(float lo, float hi) {
    return (u32)float_to_half(lo) | ((u32)float_to_half(hi) << 16);
}
__device__ __forceinline__ float bf16_to_float(u16 b) { return __uint_as_float((u32)b << 16); }
__device__ __forceinline__ float4 floats(uint4 w) { return make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)); }

__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ __forceinline__ float4 mul4(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
__device__ __forceinline__ float4 scale4(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }

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

// An activation as products and observers take it; null what is not wanted: f32 and f16 rows for one or two rows, `t` for 3 to 32,
// f16 rows for more.
struct Activation {
    float* f;
    u16 *h, *t;
    u64 wide;   // whether warpgroups multiply `t`
};

// `t`: by 256 columns, GROUP_ROWS rows of GROUP_ROW halves, so that a product copies what it takes of some columns as it stands: values as the
// lanes of tile.cuh read them, [half][step][t] 8; then sums of groups of 32 columns, each as two halves, its own and what it lacks:
// pairs of the first, pairs of the second by turns. Rows meet all banks of shared memory by what is left over.
// Where warpgroups multiply, eight rows stand together, in matrices of 8 by 8 that their tensor cores read: lane 4g + t of a warp has columns
// 32t.. of weights (layout.cuh), so matrix 16 * half + 4 * step + k / 2 holds elements k and k + 1 of its 8 for t = 0..3; matrix 32 then has sums of
// groups, 33 what they lack.
#define GROUP_ROWS 32
#define GROUP_ROW 288
__device__ __forceinline__ u16* tile_row(const Activation& to, u32 row, u32 e) {
    u16* block = to.t + (e >> 8) * GROUP_ROWS * GROUP_ROW;
    return to.wide ? block + (row >> 3) * 8 * GROUP_ROW + (row & 7) * 8 : block + row * GROUP_ROW;
}
__device__ __forceinline__ u32 in_tile(const Activation& to, u32 e) {
    if (to.wide) return ((e & 128) >> 3 | (e & 31) >> 1) * 64 + ((e & 96) >> 4 | (e & 1));
    return (e & 0x87) | (e & 0x18) << 2 | (e & 0x60) >> 2;
}
__device__ __forceinline__ u32 in_sums(const Activation& to, u32 e) { return to.wide ? 32 * 64 + ((e >> 5) & 7) : 256 + ((e >> 6) & 3) * 4 + ((e >> 5) & 1); }
__device__ __forceinline__ u32 to_lack(const Activation& to) { return to.wide ? 64 : 2; }
__device__ __forceinline__ void put_sum(const Activation& to, u32 row, u32 e, float sum) {
    u16* at = tile_row(to, row, e) + in_sums(to, e);
    at[0] = float_to_half(sum);
    at[to_lack(to)] = float_to_half(sum - half_to_float(at[0]));
}
// Four values from element e on, as two halves each.
__device__ __forceinline__ void put_tile(const Activation& to, u32 row, u32 e, uint2 w) {
    u16* at = tile_row(to, row, e) + in_tile(to, e);
    if (!to.wide) {
        *(uint2*)at = w;
        return;
    }
    *(u32*)at = w.x;
    *(u32*)(at + 64) = w.y;
}
__device__ __forceinline__ float sum_halves(uint2 w) {
    return (half_to_float((u16)w.x) + half_to_float((u16)(w.x >> 16))) + (half_to_float((u16)w.y) + half_to_float((u16)(w.y >> 16)));
}
// Four values from element e on of a row of n; the lanes of a warp stand one after another, and all take part.
__device__ __forceinline__ void put4(const Activation& to, u32 row, u32 e, u32 n, float4 v) {
    const uint2 w = e < n ? make_uint2(floats_to_half2(v.x, v.y), floats_to_half2(v.z, v.w)) : make_uint2(0, 0);
    if (to.t) {
        float sum = sum_halves(w);
#pragma unroll
        for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (e >= n) return;
        put_tile(to, row, e, w);
        if ((threadIdx.x & 7) == 0) put_sum(to, row, e, sum);
        return;
    }
    if (e >= n) return;
    if (to.f) *(float4*)(to.f + (u64)row * n + e) = v;
    *(uint2*)(to.h + (u64)row * n + e) = w;
}
// The same, one value.
__device__ __forceinline__ void put1(const Activation& to, u32 row, u32 e, u32 n, float v) {
    const u16 w = e < n ? float_to_half(v) : (u16)0;
    if (to.t) {
        const float sum = warp_sum(half_to_float(w));
        if (e >= n) return;
        tile_row(to, row, e)[in_tile(to, e)] = w;
        if ((threadIdx.x & 31) == 0) put_sum(to, row, e, sum);
        return;
    }
    if (e >= n) return;
    if (to.f) to.f[(u64)row * n + e] = v;
    to.h[(u64)row * n + e] = w;
}

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
