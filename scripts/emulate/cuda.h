// Enough of CUDA's device language to run a kernel's text on a CPU. Slow and exact: it checks indices, layouts, synchronisation and
// arithmetic, not speed.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <immintrin.h>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
struct Index { unsigned x, y, z; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#ifdef FIBERS
#include "fibers.h"
#else
#include "threads.h"
#endif

inline u32 shuffle(u32 v, int from) {
    u32 (*slot)[12] = exchange();
    slot[my_lane()][0] = v;
    __syncwarp();
    return slot[from][0];
}
inline u32 __float_as_uint(float f) { u32 u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
inline u32 __shfl_sync(u32, u32 v, int from) { return shuffle(v, from & 31); }
inline float __shfl_sync(u32, float v, int from) { return __uint_as_float(shuffle(__float_as_uint(v), from & 31)); }
inline u32 __shfl_xor_sync(u32, u32 v, int d) { return shuffle(v, my_lane() ^ d); }
inline float __shfl_xor_sync(u32, float v, int d) { return __uint_as_float(shuffle(__float_as_uint(v), my_lane() ^ d)); }
inline float __shfl_down_sync(u32, float v, int d) {
    int from = my_lane() + d;
    return __uint_as_float(shuffle(__float_as_uint(v), from < 32 ? from : my_lane()));
}
inline int __any_sync(u32, int v) {
    u32 (*slot)[12] = exchange(), any = 0;
    slot[my_lane()][0] = v != 0;
    __syncwarp();
    for (int i = 0; i < 32; ++i) any |= slot[i][0];
    return any;
}
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
    u64 v = a | ((u64)b << 32);
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)((v >> (8 * ((s >> (4 * i)) & 7))) & 255) << (8 * i);
    return r;
}
inline u32 __umulhi(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
inline u32 __funnelshift_r(u32 lo, u32 hi, u32 s) { return (u32)((((u64)hi << 32) | lo) >> (s & 31)); }
inline u32 __cvta_generic_to_shared(const void* p) { return (u32)((const u8*)p - shared_memory); }
inline void atomicMax(u32* p, u32 v) {
    auto& a = *(std::atomic<u32>*)p;
    u32 old = a.load();
    while (old < v && !a.compare_exchange_weak(old, v)) {}
}
inline u32 atomicAdd(u32* p, u32 v) { return ((std::atomic<u32>*)p)->fetch_add(v); }
inline int __syncthreads_count(int v) {
    __shared__ u32 count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (v) atomicAdd(&count, 1);
    __syncthreads();
    const int all = (int)count;
    __syncthreads();
    return all;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline float __expf(float x) { return expf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
