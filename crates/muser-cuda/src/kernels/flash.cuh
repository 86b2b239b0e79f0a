// What attention in one pass over the keys keeps of them, a warp for the (up to 16) query heads that share a KV head: attend.cu and attend_wide.cu.
struct Flash {
    float max[2], sum[2], o[16][4];   // of heads g and g + 8; each kernel says which dimensions these are
};

__device__ __forceinline__ void clear(Flash& s) {
    s.max[0] = s.max[1] = -1.0e30f;
    s.sum[0] = s.sum[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) s.o[j][0] = s.o[j][1] = s.o[j][2] = s.o[j][3] = 0.0f;
}

// Products of queries with eight keys a tile, from `base` on, of which first..last (exclusive) count, become weights; what was kept is scaled
// with them. Maxima stay in units of the raw product, exp(x * scale) = 2^(x * unit).
template <int TILES>
__device__ __forceinline__ void weigh(Flash& s, float (&c)[TILES][4], u32 base, u32 first, u32 last, float unit) {
    const u32 t = threadIdx.x & 3;
    if (base < first || base + 8 * TILES > last) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 key = base + tile * 8 + 2 * t + (i & 1);
                if (key < first || key >= last) c[tile][i] = -1.0e30f;
            }
    }
    float top[2] = {s.max[0], s.max[1]};
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i >> 1] = fmaxf(top[i >> 1], c[tile][i]);
    // Most often no maximum rises; then lanes need not tell each other.
    if (__any_sync(0xffffffffu, top[0] > s.max[0] || top[1] > s.max[1])) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            const float shrink = exp2_fast((s.max[r] - top[r]) * unit);
            s.max[r] = top[r];
            s.sum[r] *= shrink;
#pragma unroll
            for (int j = 0; j < 16; ++j) { s.o[j][2 * r] *= shrink; s.o[j][2 * r + 1] *= shrink; }
        }
    }
    const float shift[2] = {s.max[0] * unit, s.max[1] * unit};
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            c[tile][i] = exp2_fast(c[tile][i] * unit - shift[i >> 1]);
            s.sum[i >> 1] += c[tile][i];
        }
}

// Sums of the lanes that share a head.
__device__ __forceinline__ void finish(Flash& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        s.sum[r] += __shfl_xor_sync(0xffffffffu, s.sum[r], 1);
        s.sum[r] += __shfl_xor_sync(0xffffffffu, s.sum[r], 2);
    }
}

// The keys of first..last that part `z` of `parts` has: some `step` of them; where there are none, both are the same multiple of 16.
__device__ __forceinline__ void part_of_keys(u32& first, u32& last, u32 z, u32 parts, u32 step) {
    const u32 from = first & ~15u, each = ((last - from + parts - 1) / parts + step - 1) / step * step, begin = from + z * each;
    if (begin >= last) first = last = from;
    else if (z > 0) first = begin;
    if (begin + each < last) last = begin + each;
}
