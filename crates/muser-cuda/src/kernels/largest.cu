// The largest logits of rows, so that a host that samples from them need not read all.
// Layout: first a warp finds the largest of each SPAN tokens; then a block a row takes the k-th largest of these as a floor, above which
// k logits are for sure, and writes the tokens that reach it.
// Bytes: a row of logits, then the spans that reach the floor, some k of them. Latency binds: both kernels take microseconds.
// Mirrors of largest.rs.
#define SPAN 256      // tokens
#define SPANS 1024    // of a row at most: a thread of the second kernel has one

__device__ __forceinline__ bool allows(const u32* mask, u32 token) { return !mask || mask[token >> 5] >> (token & 31) & 1; }

// Largest allowed logit of each span, minus infinity where none is allowed; plus infinity where a logit, allowed or not, isn't finite.
// grid: (rows, spans / 8), 256 threads.
extern "C" __global__ void __launch_bounds__(256) span_largest(const float* logits, u32 n, u32 first, const u32* mask, float* largest) {
    allow_next();
    wait_previous();
    const u32 span = blockIdx.y * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (span * SPAN >= n) return;
    const float infinity = __uint_as_float(0x7f800000u), *row = logits + (u64)(first + blockIdx.x) * n;
    float x[SPAN / 32], most = -infinity;
#pragma unroll
    for (int i = 0; i < SPAN / 32; ++i) {
        const u32 token = span * SPAN + i * 32 + lane;
        x[i] = token < n ? row[token] : -3.0e38f;
    }
#pragma unroll
    for (int i = 0; i < SPAN / 32; ++i) {
        const u32 token = span * SPAN + i * 32 + lane;
        const bool finite = (__float_as_uint(x[i]) & 0x7f800000u) != 0x7f800000u;
        if (!finite) most = infinity;
        else if (token < n && allows(mask, token)) most = fmaxf(most, x[i]);
    }
    most = warp_max(most);
    if (lane == 0) largest[blockIdx.x * SPANS + span] = most;
}

// Floats in their order as numbers, none of which is 0.
__device__ __forceinline__ u32 ordered(float f) {
    const u32 bits = __float_as_uint(f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// found, of each row: how many reach the floor (0xffffffff where a logit isn't finite), the floor (minus infinity: what is there are all that are
// allowed), then `room` tokens with their logits, in no order. grid: (rows), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) largest_found(const float* logits, u32 n, u32 first, const u32* mask, const float* largest, u32 k, u32 room, uint2* found) {
    __shared__ float of_span[SPANS];
    __shared__ u32 count;
    allow_next();
    wait_previous();
    const u32 spans = (n + SPAN - 1) / SPAN, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float infinity = __uint_as_float(0x7f800000u), mine = threadIdx.x < spans ? largest[blockIdx.x * SPANS + threadIdx.x] : -infinity;
    const u32 key = threadIdx.x < spans ? ordered(mine) : 0;
    found += (u64)blockIdx.x * (room + 1);
    of_span[threadIdx.x] = mine;
    if (threadIdx.x == 0) count = 0;
    if (__syncthreads_count(mine == infinity) > 0) {
        if (threadIdx.x == 0) *found = make_uint2(0xffffffffu, 0);
        return;
    }
    // The largest key that k spans reach, bit by bit.
    u32 least = 0;
#pragma unroll 1
    for (u32 bit = 0x80000000u; bit > 0; bit >>= 1)
        if (__syncthreads_count(key >= (least | bit)) >= (int)k) least |= bit;
    const float floor = least == 0 ? -infinity : unordered(least), *row = logits + (u64)(first + blockIdx.x) * n;
    for (u32 span = warp; span < spans; span += 32) {
        if (of_span[span] < floor || of_span[span] == -infinity) continue;
        float x[SPAN / 32];
#pragma unroll
        for (int i = 0; i < SPAN / 32; ++i) {
            const u32 token = span * SPAN + i * 32 + lane;
            x[i] = token < n ? row[token] : -infinity;
        }
#pragma unroll
        for (int i = 0; i < SPAN / 32; ++i) {
            const u32 token = span * SPAN + i * 32 + lane;
            if (token >= n || x[i] < floor || !allows(mask, token)) continue;
            const u32 at = atomicAdd(&count, 1u);
            if (at < room) found[1 + at] = make_uint2(token, __float_as_uint(x[i]));
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) *found = make_uint2(count, __float_as_uint(floor));
}
