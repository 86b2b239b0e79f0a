// What kernels/ptx.cuh says in PTX, in C++.
#pragma once
inline float half_to_float(u16 h) { return _cvtsh_ss(h); }
inline u16 round_half(float f) { return _cvtss_sh(f, 0); }
inline u16 float_to_half(float f) { return round_half(fminf(fmaxf(f, -65504.0f), 65504.0f)); }
inline u32 small_half2(float lo, float hi) { return (u32)round_half(lo) | ((u32)round_half(hi) << 16); }
inline void allow_next() {}
inline void wait_previous() {}
inline u32 keep(u32 v) { return v; }
// Products of halves are exact in double, and so are most sums; rounding twice is then rounding once.
inline u32 hfma2(u32 a, u32 b, u32 c) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16)
        r |= (u32)round_half((float)((double)half_to_float(a >> i) * half_to_float(b >> i) + (double)half_to_float(c >> i))) << i;
    return r;
}
inline u32 hmul2(u32 a, u32 b) { return hfma2(a, b, 0x80008000); }
inline u32 hadd2(u32 a, u32 b) { return hfma2(a, 0x3c003c00, b); }
inline u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
inline u32 twice_low(u32 a) { return (a & 0xffff) * 0x10001u; }
inline u32 twice_high(u32 a) { return (a >> 16) * 0x10001u; }
// c (16 x 8) += a (16 x 16) * b (16 x 8): a lane's words as mma.m16n8k16 takes them.
inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    u32 (*slot)[12] = exchange();
    const int lane = my_lane(), g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 6; ++i) {
        float pair[2] = {half_to_float(mine[i]), half_to_float(mine[i] >> 16)};
        memcpy(&slot[lane][2 * i], pair, 8);
    }
    __syncwarp();
    double sums[4] = {c[0], c[1], c[2], c[3]};
    for (int s = 0; s < 2; ++s)
        for (int k = 0; k < 4; ++k) {
            float a[2][2], b[2][2];
            memcpy(a[0], &slot[g * 4 + k][4 * s], 8);
            memcpy(a[1], &slot[g * 4 + k][4 * s + 2], 8);
            memcpy(b[0], &slot[2 * t * 4 + k][8 + 2 * s], 8);
            memcpy(b[1], &slot[(2 * t + 1) * 4 + k][8 + 2 * s], 8);
            for (int i = 0; i < 4; ++i)
                sums[i] += (double)a[i >> 1][0] * b[i & 1][0] + (double)a[i >> 1][1] * b[i & 1][1];
        }
    for (int i = 0; i < 4; ++i) c[i] = (float)sums[i];
}
// The same of a warpgroup, of which each warp has 16 rows: they need no other's.
template <int WIDE_K>
inline u32 wide_at(u32 at) { return at >> 4 | (WIDE_K >> 4) << 16; }
inline void wide_begin() {}
template <int WIDE_N>
inline void wide_mma(float c[2][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    const int lane = my_lane(), g = lane >> 2, t = lane & 3;
    for (int n = 0; n < 2; ++n) {
        u32 word[2];
        for (int k = 0; k < 2; ++k)
            memcpy(&word[k], shared_memory + (int)((b & 0x3fff) * 16 + k * (b >> 16) * 16 + n * WIDE_N + g * 16 + t * 4), 4);
        mma(c[n], a0, a1, a2, a3, word[0], word[1]);
    }
}
template <int N>
inline void wide_rows(float (&c)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    const int lane = my_lane(), g = lane >> 2, t = lane & 3;
    for (int n = 0; n < N; ++n) {
        u32 word[2];
        for (int k = 0; k < 2; ++k) memcpy(&word[k], shared_memory + (int)((b & 0x3fff) * 16 + k * (b >> 16) * 16 + n * 128 + g * 16 + t * 4), 4);
        mma(c[n], a0, a1, a2, a3, word[0], word[1]);
    }
}
// A half of b in lines.
inline u32 in_line(u32 at) {
    u16 half;
    memcpy(&half, shared_memory + (int)(at ^ (at >> 7 & 7) << 4), 2);
    return half;
}
inline void wide_lines(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    const u32 lane = my_lane(), g = lane >> 2, t = lane & 3, at = (b & 0x3fff) * 16;
    for (u32 n = 0; n < 8; ++n) {
        const u32 from = at + (n * 8 + g) * 128 + t * 4;
        mma(c[n], a0, a1, a2, a3, in_line(from) | in_line(from + 2) << 16, in_line(from + 16) | in_line(from + 18) << 16);
    }
}
inline void wide_across(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    const u32 lane = my_lane(), g = lane >> 2, t = lane & 3, at = (b & 0x3fff) * 16, next = (b >> 16) * 16;
    for (u32 n = 0; n < 16; ++n) {
        const u32 from = at + n / 8 * next + 2 * t * 128 + n % 8 * 16 + g * 2;
        mma(c[n], a0, a1, a2, a3, in_line(from) | in_line(from + 128) << 16, in_line(from + 1024) | in_line(from + 1152) << 16);
    }
}
inline void show() {}
inline void wide_end() {}
inline void wide_done() {}
inline void copy16(u32 to, const void* from) { my_copies().back().push_back({shared_memory + (int)to, (const u8*)from, 16}); }
inline void copy8_near(u32 to, const void* from) { my_copies().back().push_back({shared_memory + (int)to, (const u8*)from, 8}); }
inline void copy16_if(u32 wanted, u32 to, const void* from) {
    if (wanted) copy16(to, from);
}
inline void copy16_near(u32 to, const void* from) { copy16(to, from); }
inline void commit() { my_copies().emplace_back(); }
template <int N>
inline void arrived() {
    auto& groups = my_copies();
    while ((int)groups.size() - 1 > N) {
        for (auto& c : groups.front()) memcpy(c.to, c.from, c.bytes);
        groups.pop_front();
    }
}
// Bulk copies arrive when somebody waits for them.
#define BULK 1
inline void open_barrier(u32 at, u32 arrivals = 1) {
    std::lock_guard lock(bulk_lock);
    bulk_copies()[at] = {{}, 0, arrivals, arrivals};
}
inline void open_barriers() {}
inline void arrive(u32 barrier) {
    std::lock_guard lock(bulk_lock);
    Bulk& b = bulk_copies().at(barrier);
    if (--b.left == 0) b.left = b.arrivals, b.phase += 1;
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    std::lock_guard lock(bulk_lock);
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16 || !bulk_copies().count(barrier) || bulk_copies()[barrier].copy.to) abort();
    bulk_copies()[barrier].copy = {shared_memory + (int)to, (const u8*)from, (int)bytes};
}
inline void wait_bulk(u32 barrier, u32 parity = 0) {
    for (;;) {
        {
            std::lock_guard lock(bulk_lock);
            Bulk& b = bulk_copies().at(barrier);
            if (b.copy.to) {
                memcpy(b.copy.to, b.copy.from, b.copy.bytes);
                b.copy = {};
                b.phase += 1;
            }
            if ((b.phase & 1) != parity) return;
        }
        let_others_run();
    }
}
template <class T>
inline T shared_at(u32 at) {
    if (at % sizeof(T)) abort();
    T v;
    memcpy(&v, shared_memory + (int)at, sizeof v);
    return v;
}
inline uint4 lds128(u32 at) { return shared_at<uint4>(at); }
inline uint2 lds64(u32 at) { return shared_at<uint2>(at); }
inline u32 lds32(u32 at) { return shared_at<u32>(at); }
inline u32 lds16(u32 at) { return shared_at<u16>(at); }
inline uint4 transposed(u32 at) {
    if (at % 16) abort();
    u32 (*slot)[12] = exchange(), found[4];
    const int lane = my_lane(), g = lane >> 2, t = lane & 3;
    slot[lane][0] = at;
    __syncwarp();
    for (int m = 0; m < 4; ++m)
        found[m] = shared_at<u16>(slot[8 * m + 2 * t][0] + 2 * g) | (u32)shared_at<u16>(slot[8 * m + 2 * t + 1][0] + 2 * g) << 16;
    return {found[0], found[1], found[2], found[3]};
}
inline uint4 load_far(const void* from) {
    uint4 v;
    memcpy(&v, from, sizeof v);
    return v;
}
inline void count_up(u32* counter) { __atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL); }
inline u32 load_count(const u32* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
inline void stand_by() { std::this_thread::yield(); }
inline float exp2_fast(float x) { return exp2f(x); }
