// Products of the strict lane, from the panels of panels.cuh.
// Layout: a warp takes one panel, or two where there are enough, so that an activation serves two weights; their tiles come through a
// ring of its own in shared memory; activations stand there for the whole block.
// Bytes: the weights, once for eight activations; Q4_K 6 bits a weight, Q6_K 10. Operations: codes become floats by their bits, minus
// an offset, times the scale, minus the minimum: each exact or rounded as the reference rounds it. Instructions bind.
#define STAGES 4

struct Panels {
    const u8* tiles;
    float* out;
    int form, rows, cols;
    float scale;
};
struct Parts {
    Panels part[4];
};

// Four nibbles, places in a table of 16 bytes.
__device__ __forceinline__ u32 looked_up(u32 q, u32 t0, u32 t1, u32 t2, u32 t3) {
    u32 at = q & 0x7777, low = __byte_perm(t0, t1, at), high = __byte_perm(t2, t3, at);
    return __byte_perm(low, high, 0x3210 | ((q & 0x8888) >> 1));
}

// Eight weights: of a row of a tile, columns 4q .. 4q + 3 of the two 32s of a pair.
template <int F>
__device__ __forceinline__ void weights_of(const u8* tile, u32 row, u32 q, u32 pair, float* w) {
    if (F == AS_F32) {
        float4 a = *(const float4*)(tile + row * 128 + q * 16), b = *(const float4*)(tile + 512 + row * 128 + q * 16);
        w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
        return;
    }
    if (is_float(F)) {
        uint4 v = *(const uint4*)(tile + pair * 512 + row * 128 + q * 16);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u16 bits = (u16)(words[i / 2] >> (i & 1) * 16);
            w[i] = F == AS_F16 ? half_to_float(bits) : bf16_to_float(bits);
        }
        return;
    }
    u32 first, second;
    if (is_byte(F)) {
        uint2 v = *(const uint2*)(tile + pair * 256 + row * 64 + q * 8);
        first = v.x, second = v.y;
    } else {
        u32 v = *(const u32*)(tile + pair * 128 + row * 32 + q * 4);
        if (F == AS_TABLE) {
            first = looked_up(v, IQ4_TABLE(0), IQ4_TABLE(1), IQ4_TABLE(2), IQ4_TABLE(3));
            second = looked_up(v >> 16, IQ4_TABLE(0), IQ4_TABLE(1), IQ4_TABLE(2), IQ4_TABLE(3));
        } else if (F == AS_FP4) {
            // 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, each 128 too high.
            first = looked_up(v, 0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c);
            second = looked_up(v >> 16, 0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c);
        } else {
            first = v & 0x0f0f0f0f, second = (v >> 4) & 0x0f0f0f0f;
        }
    }
    const u8* scales = tile + codes_of(F);
    float s[2], m[2] = {0.0f, 0.0f};
    if (has_min(F)) {
        float4 v = *(const float4*)(scales + pair * 64 + row * 16);
        s[0] = v.x, m[0] = v.y, s[1] = v.z, m[1] = v.w;
    } else {
        float2 v = *(const float2*)(scales + (is_fine(F) ? pair * 64 + row * 16 + (q >> 2) * 8 : pair * 32 + row * 8));
        s[0] = v.x, s[1] = v.y;
    }
    // 1.0 and what codes are too high, in units of its last place.
    const float offset = __uint_as_float(0x3f800000 + (has_min(F) ? 0 : F == AS_NIBBLE ? 8 : 128));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float v = __uint_as_float(__byte_perm(i < 4 ? first : second, 0x3f800000, 0x7650 + (i & 3)));
        // (1 + c) s - s, rounded once, is c s rounded, but +0 for every c of zero.
        w[i] = is_plain(F) ? __fmaf_rn(v, s[i / 4], -s[i / 4]) : (v - offset) * s[i / 4];
        if (has_min(F)) w[i] -= m[i / 4];
    }
}

// The form as a constant, for code that is made for each.
#define FOR_FORM(form, ...) \
    switch (form) { \
        case AS_F32: { constexpr int F = AS_F32; __VA_ARGS__; break; } \
        case AS_F16: { constexpr int F = AS_F16; __VA_ARGS__; break; } \
        case AS_BF16: { constexpr int F = AS_BF16; __VA_ARGS__; break; } \
        case AS_NIBBLE: { constexpr int F = AS_NIBBLE; __VA_ARGS__; break; } \
        case AS_MIN: { constexpr int F = AS_MIN; __VA_ARGS__; break; } \
        case AS_MIN_SIGNED: { constexpr int F = AS_MIN_SIGNED; __VA_ARGS__; break; } \
        case AS_TABLE: { constexpr int F = AS_TABLE; __VA_ARGS__; break; } \
        case AS_FP4: { constexpr int F = AS_FP4; __VA_ARGS__; break; } \
        case AS_BYTE: { constexpr int F = AS_BYTE; __VA_ARGS__; break; } \
        case AS_FINE: { constexpr int F = AS_FINE; __VA_ARGS__; break; } \
        case AS_BYTE_MIN: { constexpr int F = AS_BYTE_MIN; __VA_ARGS__; break; } \
        case AS_BYTE_MIN_SIGNED: { constexpr int F = AS_BYTE_MIN_SIGNED; __VA_ARGS__; break; } \
    }

// x = the table's row, normed without weight where eps >= 0. grid: (rows), 256 threads, a row of floats in shared memory.
extern "C" __global__ void __launch_bounds__(256) strict_embed(const Row* rows, const Panels table, float eps, float* x) {
    __shared__ float factor;
    float* v = (float*)shared_bytes;
    const u32 cols = table.cols;
    allow_next();
    wait_previous();
    const u32 token = rows[blockIdx.x].token;
    FOR_FORM(table.form, {
        const u8* panel = table.tiles + (u64)(token / 4) * tiles_of(F, cols) * tile_of(F);
        for (u32 i = threadIdx.x; i < tiles_of(F, cols) * pairs_of(F) * 8; i += 256) {
            float w[8];
            weights_of<F>(panel + (u64)(i / 8 / pairs_of(F)) * tile_of(F), token % 4, i % 8, i / 8 % pairs_of(F), w);
            for (u32 e = 0; e < 8; ++e) {
                u32 at = i / 8 * 64 + e / 4 * 32 + i % 8 * 4 + e % 4;
                v[at] = at < cols ? w[e] : 0.0f;
            }
        }
        for (u32 i = tiles_of(F, cols) * pairs_of(F) * 64 + threadIdx.x; i < (cols + SUM_STEP - 1) / SUM_STEP * SUM_STEP; i += 256) v[i] = 0.0f;
    });
    const float f = block_factor(v, cols, eps, &factor);
    for (u32 i = threadIdx.x; i < cols; i += 256) x[(u64)blockIdx.x * cols + i] = eps >= 0.0f ? v[i] * f : v[i];
}

// A tile of each of R panels, `apart` bytes apart, to the ring.
template <int F, int R>
__device__ __forceinline__ void fetch(u32 to, const u8* from, u64 apart, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < R * tile_of(F); c += 512) {
        const u32 at = c + lane * 16, second = R == 2 && at >= tile_of(F);
        if (at < R * tile_of(F)) copy16(to + at, from + (second ? apart - tile_of(F) : 0) + at);
    }
}
// Where a run of a panel's tiles begins, those of a slice of columns, and how many they are.
template <int F>
__device__ __forceinline__ const u8* run_of(const Panels& m, u32 panel, u32 base) {
    return m.tiles + ((u64)panel * tiles_of(F, m.cols) + base / (pairs_of(F) * 64)) * tile_of(F);
}
template <int F>
__device__ __forceinline__ u32 run_tiles(u32 cols, u32 base, u32 slice) {
    u32 all = tiles_of(F, cols) - base / (pairs_of(F) * 64), most = slice / (pairs_of(F) * 64);
    return all < most ? all : most;
}
// What a warp multiplies: R panels from `panel` on, in a slice of columns, through its ring.
struct Run {
    Panels m;
    u32 panel, base, slice, ring, slot, lane;
};
// The first tiles on their way to the ring, a group of copies each.
template <int F, int R>
__device__ __forceinline__ void begin(const Run& run) {
    const u8* from = run_of<F>(run.m, run.panel, run.base);
    const u32 tiles = run_tiles<F>(run.m.cols, run.base, run.slice);
#pragma unroll
    for (u32 t = 0; t < STAGES - 1; ++t) {
        if (t < tiles) fetch<F, R>(run.ring + t * run.slot, from + t * tile_of(F), (u64)tiles_of(F, run.m.cols) * tile_of(F), run.lane);
        commit();
    }
}
// Adds the products with C rows of activations, a slice apart in shared memory; acc: [row of x][panel] four sums.
template <int F, int C, int R>
__device__ __forceinline__ void add(const Run& run, const u8* ring, const float* x, int live, float* acc) {
    const u8* from = run_of<F>(run.m, run.panel, run.base) + (STAGES - 1) * tile_of(F);
    const u32 tiles = run_tiles<F>(run.m.cols, run.base, run.slice), q = run.lane & 7, p = run.lane >> 3;
    const u64 apart = (u64)tiles_of(F, run.m.cols) * tile_of(F);
    u32 slot = 0, ahead = (STAGES - 1) * run.slot;
    x += q * 4;
    for (u32 t = 0; t < tiles; ++t) {
        arrived<STAGES - 2>();
        __syncwarp();
        if (t + STAGES - 1 < tiles) fetch<F, R>(run.ring + ahead, from, apart, run.lane);
        commit();
        const u8* tile = ring + slot;
#pragma unroll
        for (u32 pair = 0; pair < pairs_of(F); ++pair) {
            float w[R][8];
#pragma unroll
            for (int r = 0; r < R; ++r) weights_of<F>(tile + r * tile_of(F), p, q, pair, w[r]);
#pragma unroll
            for (int c = 0; c < C; ++c) {
                if (C > 1 && c >= live) break;
                const float4 a = *(const float4*)(x + c * run.slice + pair * 64), b = *(const float4*)(x + c * run.slice + pair * 64 + 32);
                const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 8; ++i)
#pragma unroll
                    for (int r = 0; r < R; ++r) acc[(c * R + r) * 4 + (i & 3)] = __fmaf_rn(w[r][i], v[i], acc[(c * R + r) * 4 + (i & 3)]);
            }
        }
        x += pairs_of(F) * 64;
        from += tile_of(F);
        slot = slot == (STAGES - 1) * run.slot ? 0 : slot + run.slot;
        ahead = ahead == (STAGES - 1) * run.slot ? 0 : ahead + run.slot;
    }
}

// out[c][r] = W[r] . x[c] for up to four matrices. Their panels go to warps, R at a time; a block's warps share C rows of x, `slice`
// columns at a time.
template <int C, int R>
__device__ __forceinline__ void project(const Parts& parts, const float* x, int n, u32 slice, u32 rounds, u32 slot) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cols = parts.part[0].cols, whole = (cols + 255) / 256 * 256;
    const int first = blockIdx.y * C, live = n - first < C ? n - first : C;
    float* xs = (float*)shared_bytes;
    const u8* ring = (const u8*)(xs + C * slice) + warp * (slot * STAGES);
    for (u32 round = 0; round < rounds; ++round) {
        const u32 place = (round * gridDim.x + blockIdx.x) * (blockDim.x >> 5) + warp;
        Run run = {parts.part[0], place * R, 0, slice, (u32)__cvta_generic_to_shared(ring), slot, lane};
        u32 before = 0;
#pragma unroll
        for (int i = 1; i < 4; ++i) {
            before += (parts.part[i - 1].rows + 4 * R - 1) / (4 * R);
            if (place >= before && parts.part[i].rows > 0) run.m = parts.part[i], run.panel = (place - before) * R;
        }
        const bool works = run.panel * 4 < (u32)run.m.rows;
        float acc[C * R * 4];
#pragma unroll
        for (int i = 0; i < C * R * 4; ++i) acc[i] = 0.0f;
        for (; run.base < whole; run.base += slice) {
            // All lanes have read the ring's last tiles.
            __syncwarp();
            if (works) FOR_FORM(run.m.form, (begin<F, R>(run)))
            if (round == 0 && run.base == 0) {
                allow_next();
                wait_previous();
            }
            if (round == 0 || slice < whole) {
                __syncthreads();
                for (int c = 0; c < live; ++c) {
                    const float* row = x + (u64)(first + c) * cols + run.base;
#pragma unroll 4
                    for (u32 i = threadIdx.x * 4; i < slice; i += blockDim.x * 4)
                        *(float4*)(xs + c * slice + i) = run.base + i < cols ? *(const float4*)(row + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                __syncthreads();
            }
            if (works) FOR_FORM(run.m.form, (add<F, C, R>(run, ring, xs, live, acc)))
        }
        if (!works) continue;
        // Lanes 4q + e: distances 16, 8 and 4 are other threads', 2 and 1 are here.
#pragma unroll
        for (int i = 0; i < C * R * 4; ++i)
#pragma unroll
            for (int d = 4; d > 0; d >>= 1) acc[i] += __shfl_xor_sync(0xffffffffu, acc[i], d);
        const u32 row = run.panel * 4 + (lane >> 3);
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float* a = acc + (c * R + r) * 4;
                float v = (a[0] + a[2]) + (a[1] + a[3]);
                if (run.m.scale != 1.0f) v *= run.m.scale;
                if (c < live && (lane & 7) == 0 && row + r * 4 < (u32)run.m.rows) run.m.out[(u64)(first + c) * run.m.rows + row + r * 4] = v;
            }
    }
}
// Rows of x that a block takes, and panels of a warp. grid: (blocks, ceil(n / C)); shared memory: C * slice floats, then a ring a warp.
#define ARGUMENTS const Parts parts, const float *x, int n, u32 slice, u32 rounds, u32 slot
extern "C" __global__ void __launch_bounds__(640) strict_project_1(ARGUMENTS) { project<1, 1>(parts, x, n, slice, rounds, slot); }
extern "C" __global__ void __launch_bounds__(640) strict_project_1_wide(ARGUMENTS) { project<1, 2>(parts, x, n, slice, rounds, slot); }
extern "C" __global__ void __launch_bounds__(384) strict_project_8(ARGUMENTS) { project<8, 2>(parts, x, n, slice, rounds, slot); }
