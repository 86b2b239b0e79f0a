// Enough of CUDA's device language to run a kernel's text on a CPU: a block is THREADS threads of the system, a warp 32 of them that
// exchange values at barriers. Slow and exact: it checks indices, layouts and synchronisation, not speed.
#pragma once
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
struct Index { unsigned x, y, z; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

struct Warp {
    std::barrier<> gate{32};
    u32 slot[32][8];
};
struct Block {
    std::vector<std::unique_ptr<Warp>> warps;
    std::barrier<> gate{THREADS};
};
static Block* block;
static u8* shared_memory;
static Warp& my_warp() { return *block->warps[threadIdx.x >> 5]; }
static int my_lane() { return threadIdx.x & 31; }
inline void __syncthreads() { block->gate.arrive_and_wait(); }
inline void __syncwarp() { my_warp().gate.arrive_and_wait(); }
inline u32 shuffle(u32 v, int from) {
    Warp& w = my_warp();
    w.slot[my_lane()][0] = v;
    w.gate.arrive_and_wait();
    u32 r = w.slot[from][0];
    w.gate.arrive_and_wait();
    return r;
}
inline u32 __float_as_uint(float f) { u32 u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
inline float __shfl_xor_sync(u32, float v, int d) { return __uint_as_float(shuffle(__float_as_uint(v), my_lane() ^ d)); }
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
    u64 v = a | ((u64)b << 32);
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)((v >> (8 * ((s >> (4 * i)) & 7))) & 255) << (8 * i);
    return r;
}
inline u32 __funnelshift_r(u32 lo, u32 hi, u32 s) { return (u32)((((u64)hi << 32) | lo) >> (s & 31)); }
inline void atomicMax(u32* p, u32 v) {
    auto& a = *(std::atomic<u32>*)p;
    u32 old = a.load();
    while (old < v && !a.compare_exchange_weak(old, v)) {}
}
using std::fabs;
inline float fmaxf_(float a, float b) { return a > b ? a : b; }

// What common.cuh and project.cu say in PTX.
inline float half_to_float(u16 h) { return _cvtsh_ss(h); }
inline u16 float_to_half(float f) { return _cvtss_sh(fminf(fmaxf(f, -65504.0f), 65504.0f), 0); }
inline u16 round_half(double v) { return _cvtss_sh((float)v, 0); }
inline u32 hfma2(u32 a, u32 b, u32 c) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16)
        r |= (u32)round_half((double)half_to_float(a >> i) * half_to_float(b >> i) + (double)half_to_float(c >> i)) << i;
    return r;
}
inline u32 hmul2(u32 a, u32 b) { return hfma2(a, b, 0x80008000); }
inline u32 hadd2(u32 a, u32 b) { return hfma2(a, 0x3c003c00, b); }
inline float warp_max(float v) {
    for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}
inline void allow_next() {}
inline void wait_previous() {}
inline void matrix_product(float* c, int steps, const u32* mine, int a_words) {
    // Words: a[0..a_words], then b; the fragments of mma.m16n8k16 (steps 2) and m16n8k8 (steps 1).
    Warp& w = my_warp();
    int lane = my_lane(), g = lane >> 2, t = lane & 3, words = a_words + steps;
    for (int i = 0; i < words; ++i) w.slot[lane][i] = mine[i];
    w.gate.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {
        int row = g + 8 * (i >> 1), col = 2 * t + (i & 1);
        double sum = c[i];
        for (int s = 0; s < steps; ++s)
            for (int k = 0; k < 8; ++k) {
                u32 a = w.slot[(row & 7) * 4 + k / 2][s * 2 + (row >> 3)], b = w.slot[col * 4 + k / 2][a_words + s];
                sum += (double)half_to_float(a >> (16 * (k & 1))) * half_to_float(b >> (16 * (k & 1)));
            }
        c[i] = (float)sum;
    }
    w.gate.arrive_and_wait();
}
inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 words[6] = {a0, a1, a2, a3, b0, b1};
    matrix_product(c, 2, words, 4);
}
inline void mma8(float* c, u32 a0, u32 a1, u32 b) {
    u32 words[3] = {a0, a1, b};
    matrix_product(c, 1, words, 2);
}
// Copies become visible when they are waited for, as late as the hardware may.
struct Copy { u8* to; const u8* from; };
static thread_local std::vector<std::vector<Copy>> groups(1);
inline u32 __cvta_generic_to_shared(const void* p) { return (u32)((const u8*)p - shared_memory); }
inline void copy16(u32 to, const u8* from) { groups.back().push_back({shared_memory + to, from}); }
inline void commit() { groups.emplace_back(); }
template <int N>
inline void arrived() {
    while ((int)groups.size() - 1 > N) {
        for (auto& c : groups.front()) memcpy(c.to, c.from, 16);
        groups.erase(groups.begin());
    }
}
template <class T>
inline T shared_at(u32 at) {
    if (at % sizeof(T)) abort();
    T v;
    memcpy(&v, shared_memory + at, sizeof v);
    return v;
}
inline uint4 lds128(u32 at) { return shared_at<uint4>(at); }
inline uint2 lds64(u32 at) { return shared_at<uint2>(at); }
inline u32 lds32(u32 at) { return shared_at<u32>(at); }
inline u32 lds16(u32 at) { return shared_at<u16>(at); }
inline u32 keep(u32 v) { return v; }

// Runs a grid of blocks of THREADS threads, one block after another.
template <class Kernel>
void launch(unsigned gx, unsigned gy, unsigned shared, Kernel kernel) {
    std::vector<u8> memory(shared + 64);
    shared_memory = (u8*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    for (unsigned y = 0; y < gy; ++y)
        for (unsigned x = 0; x < gx; ++x) {
            Block here;
            for (int i = 0; i < THREADS / 32; ++i) here.warps.push_back(std::make_unique<Warp>());
            block = &here;
            std::vector<std::thread> all;
            for (unsigned i = 0; i < THREADS; ++i)
                all.emplace_back([=] {
                    threadIdx = {i, 0, 0};
                    blockIdx = {x, y, 0};
                    blockDim = {THREADS, 1, 1};
                    gridDim = {gx, gy, 1};
                    kernel();
                });
            for (auto& t : all) t.join();
        }
}
