// One tile of layout.cuh times the activation rows that a kernel is compiled for (COLUMNS): on tensor cores, as a warp, or, where TEAM is
// defined as 4, as one of the warps of a warpgroup.
#define NT (COLUMNS > 8 ? 2 : 1)
#ifndef TEAM
#define TEAM 1
#endif
#ifndef RING_TILES
#define RING_TILES 3   // tiles of four bits a weight that a warp has on their way
#endif

// What is different between types.
template <int LAYOUT>
struct Kind {
    static constexpr int parts = LAYOUT == F16 ? 4 : 1, part_bytes = tile_bytes(LAYOUT) / parts;
    static constexpr int stages = LAYOUT == F16 ? 4 : LAYOUT == Q8 || LAYOUT == Q6K ? 2 : RING_TILES;
    // Sums of groups are scaled instead of weights.
    static constexpr bool spread = COLUMNS <= 2 && LAYOUT != F16;
    // Minima, or what quants stand too high, are multiplied with sums of the activations.
    static constexpr bool k_sums = LAYOUT == Q4K || LAYOUT == Q5K, sums = k_sums || (spread && LAYOUT != FP4);
    // Values that share a scale; those of 256 columns' sums.
    static constexpr int group = LAYOUT == Q6K || LAYOUT == FP4 ? 16 : 32, sum_bytes = sums ? 256 / group * 4 : 0;
    // What an unscaled sum has to be multiplied with, and its second half besides.
    static constexpr float unit = LAYOUT == FP4 ? 1.0f : 16777216.0f, second = LAYOUT == Q8 || LAYOUT == IQ4 || LAYOUT == FP4 ? 1.0f : 0.0625f;
};

// Fetches a tile; `at` is where this lane's 16 bytes of each 512 are, which both addresses hold already.
template <int LAYOUT>
__device__ __forceinline__ void fetch_at(u32 to, const u8* from, u32 at) {
    constexpr int bytes = Kind<LAYOUT>::part_bytes;
#pragma unroll
    for (int o = 0; o < bytes; o += 512)
        if (o + 512 <= bytes || at < bytes - o) copy16(to + o, from + o);
}

// Where a lane reads in every tile.
struct Lane {
    u32 piece, head, word, next, shift;
    Masks masks;
    u32 six;
};

template <int LAYOUT>
__device__ __forceinline__ Lane lane_of(u32 lane, u32 piece, const Masks& masks) {
    const u32 g = lane >> 2, t = lane & 3, head = head_at(LAYOUT);
    constexpr bool grouped = Kind<LAYOUT>::k_sums;
    return {keep(piece), keep(grouped ? head + g * 16 : head + lane * 8), keep(grouped ? head + g * 16 + k_word(t) * 4 : Q6K_D + g * 2),
            keep(head + g * 16 + k_next(t) * 4), keep(k_shift(t)), masks, keep(six_bits(masks))};
}

// One step of both rows against all activation rows.
__device__ __forceinline__ void multiply(float acc[2 * NT][4], const u32* f0, const u32* f1, const u32 x[NT], int at) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        uint4 b = lds128(x[n] + at * 2);
        // Two sums, so that products do not wait for each other.
        mma(acc[2 * n], f0[0], f1[0], f0[1], f1[1], b.x, b.y);
        mma(acc[2 * n + 1], f0[2], f1[2], f0[3], f1[3], b.z, b.w);
    }
}

// Quants of one row that a lane has for half of a tile's columns.
template <int LAYOUT>
struct Quants {
    uint4 q, more;   // more: Q8
    u32 high[2];     // Q5K, Q6K
    __device__ __forceinline__ void load(u32 u, u32 lane_piece, int piece) {
        if (LAYOUT == Q8) {
            q = lds128(u + lane_piece + piece * 2);
            more = lds128(u + lane_piece + piece * 2 + 512);
        } else {
            q = lds128(u + lane_piece + piece);
        }
        if (LAYOUT == Q5K) high[0] = lds32(u + 2048 + lane_piece / 4 + piece / 4);
        if (LAYOUT == Q6K) {
            uint2 h = lds64(u + 2048 + lane_piece / 2 + piece / 2);
            high[0] = h.x;
            high[1] = h.y;
        }
    }
    // Step i as four pairs of halves, unscaled.
    __device__ __forceinline__ void fields(int i, const Masks& m, u32* out) const {
        const u32* w = (const u32*)&q;
        const u32* wide = i < 2 ? w : (const u32*)&more;
        if (LAYOUT == Q8) fields8(wide[(i & 1) * 2], wide[(i & 1) * 2 + 1], 0, out);
        else if (LAYOUT == Q6K) fields6(w[i], high[i >> 1], i & 1, {0, 0}, m, out);
        else if (LAYOUT == Q5K) fields5(w[i], high[0], i, {0, 0}, m, out);
        else if (LAYOUT == IQ4) fields8(four_iq4(w[i]), four_iq4(w[i] >> 16), 0, out);
        else if (LAYOUT == FP4) fields_fp4(w[i], out);
        else fields4(w[i], {0, 0}, m, out);
    }
    // The same, scaled with one of two scales.
    __device__ __forceinline__ void weights(int i, u32 scales, bool upper, const Masks& m, u32* out) const {
        const u32 scale = scale_of(scales, upper);
        const u32* w = (const u32*)&q;
        const u32* wide = i < 2 ? w : (const u32*)&more;
        if (LAYOUT == Q8) bytes8(wide[(i & 1) * 2], wide[(i & 1) * 2 + 1], scale, out);
        else if (LAYOUT == Q6K) nibbles6(w[i], high[i >> 1], i & 1, scale, m, out);
        else if (LAYOUT == Q5K) nibbles5(w[i], high[0], i, scales, upper, m, out);
        else if (LAYOUT == IQ4) nibbles_iq4(w[i], scale, out);
        else if (LAYOUT == FP4) nibbles_fp4(w[i], scale, out);
        else nibbles(w[i], scales, upper, LAYOUT, m, out);
    }
};

// What a lane's weights of a tile at address u are multiplied with, by row, and the minima of its groups.
template <int LAYOUT>
struct Factors {
    u32 scales[2][2], minima[2];
    __device__ __forceinline__ Factors(u32 u, const Lane& l) {
        if (Kind<LAYOUT>::k_sums) {
#pragma unroll
            for (int r = 0; r < 2; ++r) k_scales(lds32(u + l.head + r * 128), lds32(u + l.word + r * 128), lds32(u + l.next + r * 128), l.shift, l.six, scales[r][0], minima[r]);
            return;
        }
        uint2 s = lds64(u + l.head);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scales[r][0] = r ? s.y : s.x;
            if (LAYOUT == FP4) {
                u32 w = scales[r][0];
                scales[r][0] = fp4_scales(w, 0);
                scales[r][1] = fp4_scales(w, 1);
            }
            if (LAYOUT == Q6K) {
                u32 d = twice_low(lds16(u + l.word + r * 16)), w = scales[r][0];
                scales[r][0] = hmul2(hadd2(__byte_perm(w, 0x64646464, 0x4140), 0xe480e480), d);
                scales[r][1] = hmul2(hadd2(__byte_perm(w, 0x64646464, 0x4342), 0xe480e480), d);
            } else if (Kind<LAYOUT>::sums) {
                // 0xc800 is -8, 0xd800 is -128.
                minima[r] = hmul2(scales[r][0], LAYOUT == Q4 ? 0xc800c800 : 0xd800d800);
            }
        }
    }
    // The two among which a half has its own, and which of them is a step's.
    static constexpr bool two = Kind<LAYOUT>::group == 16;
    __device__ __forceinline__ u32 pair(int r, int half) const { return scales[r][two ? half : 0]; }
    __device__ __forceinline__ bool upper(int half, int step) const { return two ? step > 1 : half; }
};

// A tile (or part `part` of one) at address u against the activations of its columns.
// x: per 256 columns [half][step][t] 8 halves, from the lane's first on. Where sums are scaled, acc[0] are they, and acc[1] what
// minima leave. `freed` is called once the tile was read, so that its place can be filled while it is multiplied; in groups, whose rings are longer, at
// the end.
template <int LAYOUT, typename Freed>
__device__ __forceinline__ void consume(float acc[2 * NT][4], u32 u, const u32 x[NT], const u32 sums[NT], int part, const Lane& l, const Freed& freed) {
    if (LAYOUT == F16) {
        const u32 from = (part >> 1) * 256 + (part & 1) * 128, at[2] = {x[0] + from, x[NT - 1] + from};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            uint4 a = lds128(u + s * 512 + l.piece), b = lds128(u + 1024 + s * 512 + l.piece);
            multiply(acc, (const u32*)&a, (const u32*)&b, at, s * 32);
        }
        freed();
        return;
    }
    constexpr bool spread = Kind<LAYOUT>::spread;
    const Factors<LAYOUT> factors(u, l);
    const u32* minima = factors.minima;
    if (Kind<LAYOUT>::sums && LAYOUT != Q6K) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            uint2 b = lds64(sums[n]);
            mma(acc[spread ? 1 : 2 * n], minima[0], minima[1], minima[0], minima[1], b.x, b.y);
        }
    }
    constexpr int sets = Kind<LAYOUT>::group == 16 ? 2 : 1, last = 4 / sets - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Quants<LAYOUT> q[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) q[r].load(u, l.piece, (r * 2 + half) * 512);
        if (spread && half == 1) freed();
        float one[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 f[2][4];
            if (spread) {
                if (i % (last + 1) == 0)
#pragma unroll
                    for (int k = 0; k < 4; ++k) one[0][k] = one[1][k] = 0.0f;
                q[0].fields(i, l.masks, f[0]);
                q[1].fields(i, l.masks, f[1]);
                uint4 b = lds128(x[0] + (half * 128 + i * 32) * 2);
                mma(one[0], f[0][0], f[1][0], f[0][1], f[1][1], b.x, b.y);
                mma(one[Kind<LAYOUT>::second == 1.0f ? 0 : 1], f[0][2], f[1][2], f[0][3], f[1][3], b.z, b.w);
                if (i % (last + 1) == last)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        u32 pair = factors.scales[k >> 1][sets == 2 ? half : 0];
                        float scale = half_to_float((u16)((sets == 2 ? i > last : half) ? pair >> 16 : pair));
                        float sum = Kind<LAYOUT>::second == 1.0f ? one[0][k] : one[0][k] + one[1][k] * Kind<LAYOUT>::second;
                        acc[0][k] += sum * scale;
                    }
                continue;
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) q[r].weights(i, factors.pair(r, half), factors.upper(half, i), l.masks, f[r]);
            multiply(acc, f[0], f[1], x, half * 128 + i * 32);
        }
    }
    if (LAYOUT == Q6K && spread) {
        // 0xd000 is -32.
        uint2 a = lds64(sums[0]), b = lds64(sums[0] + 32);
        u32 m[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) m[r][half] = hmul2(factors.scales[r][half], 0xd000d000);
        mma(acc[1], m[0][0], m[1][0], m[0][1], m[1][1], a.x, b.x);
        mma(acc[1], m[0][0], m[1][0], m[0][1], m[1][1], a.y, b.y);
    }
    if (!spread) freed();
}

// The same by a warpgroup, each warp with a tile of its own and all with the same columns, which begin in shared memory at x. Products go
// on behind it: `wide_done` waits for them.
template <int LAYOUT, typename Freed>
__device__ __forceinline__ void consume_wide(float acc[2][4], u32 u, u32 x, int part, const Lane& l, const Freed& freed) {
    // A step is two products, each of two matrices of 128 bytes, 16 of which an operand counts as one; the second eight rows of activations
    // follow the first.
    constexpr int product = 2 * 128 / 16, octet = 8 * GROUP_ROW * 2;
    const u32 b = wide_at<128>(x);
    if (LAYOUT == F16) {
        uint4 a[2], c[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            a[s] = lds128(u + s * 512 + l.piece);
            c[s] = lds128(u + 1024 + s * 512 + l.piece);
        }
        freed();
        wide_begin();
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            wide_mma<octet>(acc, a[s].x, c[s].x, a[s].y, c[s].y, b + (part * 2 + s) * 2 * product);
            wide_mma<octet>(acc, a[s].z, c[s].z, a[s].w, c[s].w, b + ((part * 2 + s) * 2 + 1) * product);
        }
        wide_end();
        return;
    }
    const Factors<LAYOUT> factors(u, l);
    Quants<LAYOUT> all[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) all[i >> 1][i & 1].load(u, l.piece, ((i & 1) * 2 + (i >> 1)) * 512);
    freed();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Quants<LAYOUT>* q = all[half];
        u32 f[4][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) q[r].weights(i, factors.pair(r, half), factors.upper(half, i), l.masks, f[i][r]);
        wide_begin();
        if (Kind<LAYOUT>::sums && half == 0) wide_mma<octet>(acc, factors.minima[0], factors.minima[1], factors.minima[0], factors.minima[1], b + 16 * product);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            wide_mma<octet>(acc, f[i][0][0], f[i][1][0], f[i][0][1], f[i][1][1], b + (half * 4 + i) * 2 * product);
            wide_mma<octet>(acc, f[i][0][2], f[i][1][2], f[i][0][3], f[i][1][3], b + ((half * 4 + i) * 2 + 1) * product);
        }
        wide_end();
    }
}
