// QK-norm, rotation, KV store, attention and its gate, for heads of 128.
// A warp multiplies the (up to 16) query heads of one KV head with 16 keys a step on tensor cores (m16n8k16); dimensions are
// permuted alike on both sides, so that every lane reads whole 16-byte pieces of K and V straight from memory.
// Bytes: visible keys and values, once. Memory binds at depth, latency before.

// A head's keys or values in one sequence.
#ifndef KV_Q8_0
typedef u16* Plane;
#define PLANE(table, slot, head) (((u16**)(table))[slot] + (head) * HD)
#endif

// Rotates the four elements of a lane: 2l, 2l+1 (pairs interleaved) and 64+2l, 65+2l; halves pair element i with i + 64.
__device__ __forceinline__ void rotate(float2& a, float2& b, const float2* angle, int rope) {
    const int lane = threadIdx.x & 31;
    if (rope == 1) {
        float2 ca = angle[lane], cb = angle[32 + lane];
        a = make_float2(a.x * ca.x - a.y * ca.y, a.x * ca.y + a.y * ca.x);
        b = make_float2(b.x * cb.x - b.y * cb.y, b.x * cb.y + b.y * cb.x);
    } else if (rope == 2) {
        float2 c0 = angle[2 * lane], c1 = angle[2 * lane + 1], x = a, y = b;
        a = make_float2(x.x * c0.x - y.x * c0.y, x.y * c1.x - y.y * c1.y);
        b = make_float2(x.x * c0.y + y.x * c0.x, x.y * c1.y + y.y * c1.x);
    }
}

// A lane's elements 2l, 2l + 1 and 64 + 2l, 65 + 2l of head `at` of `heads`, of this block's row.
__device__ __forceinline__ void load_head(const Halves& from, int heads, int at, float2& a, float2& b) {
    const int lane = threadIdx.x & 31;
    const u32* words = (const u32*)(from.p + blockIdx.x * from.stride + at * HD);
    a = two_halves(words[lane]);
    b = two_halves(words[32 + lane]);
}
__device__ __forceinline__ void load_head(const Planes& from, int heads, int at, float2& a, float2& b) {
    const int lane = threadIdx.x & 31;
    const float2* p = (const float2*)(from.p + ((u64)blockIdx.x * heads + at) * HD);
    a = p[lane];
    b = p[32 + lane];
    for (int i = 1; i < from.count; ++i) {
        const float2 x = p[i * from.stride / 2 + lane], y = p[i * from.stride / 2 + 32 + lane];
        a = make_float2(a.x + x.x, a.y + x.y);
        b = make_float2(b.x + y.x, b.y + y.y);
    }
}

// Norm and rotation of queries and keys, and the store of keys and values, a warp a head, four a block. grid: (rows, ceil((heads + 2 * kv_heads) / 4)),
// 128 threads. Queries are left in q16, keys also in k16, where these are wanted.
template <typename From>
__device__ __forceinline__ void norm_rope_store(const Row* rows, const From& q, const From& k, const From& v, u16* q16, u16* k16, int heads, const float* q_norm, const float* k_norm, float eps, int rope, const float2* angles, const Cache& cache) {
    const Row row = rows[blockIdx.x];
    const int kv_heads = cache.kv_heads, head = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (head >= heads + 2 * kv_heads) return;
    const int kind = head < heads ? 0 : head < heads + kv_heads ? 1 : 2, at = kind == 0 ? head : kind == 1 ? head - heads : head - heads - kv_heads;
    From from = v;
    if (kind == 0) from = q;
    if (kind == 1) from = k;
    float2 a, b;
    load_head(from, kind == 0 ? heads : kv_heads, at, a, b);
    u32* kept = 0;
    if (kind < 2) {
        const float2* w = (const float2*)(kind == 0 ? q_norm : k_norm);
        const float2 wa = w[lane], wb = w[32 + lane];
        const float f = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) / (float)HD + eps);
        a = make_float2(a.x * f * wa.x, a.y * f * wa.y);
        b = make_float2(b.x * f * wb.x, b.y * f * wb.y);
        rotate(a, b, angles + (u64)row.pos * (HD / 2), rope);
        if (kind == 0) kept = (u32*)(q16 + ((u64)blockIdx.x * heads + at) * HD);
        else if (k16) kept = (u32*)(k16 + ((u64)blockIdx.x * kv_heads + at) * HD);
    }
    const u32 lo = floats_to_half2(a.x, a.y), hi = floats_to_half2(b.x, b.y);
    if (kept) { kept[lane] = lo; kept[32 + lane] = hi; }
    if (kind == 0) return;
    const u64 place = (u64)row_of(cache, row.pos) * cache.width;
#ifdef KV_Q8_0
    store_head(PLANE(kind == 1 ? cache.k : cache.v, row.slot, at), place, a, b);
#else
    u32* to = (u32*)(PLANE(kind == 1 ? cache.k : cache.v, row.slot, at) + place);
    to[lane] = lo;
    to[32 + lane] = hi;
#endif
}

// Of few rows; without heads, for keys and values that no query follows.
extern "C" __global__ void qk_few(const Row* rows, const Planes q, const Planes k, const Planes v, u16* q16, int heads, const float* q_norm, const float* k_norm, float eps, int rope, const float2* angles, const Cache cache) {
    allow_next();
    wait_previous();
    norm_rope_store(rows, q, k, v, q16, 0, heads, q_norm, k_norm, eps, rope, angles, cache);
}

// Of many.
extern "C" __global__ void qk_rows(const Row* rows, const Halves q, const Halves k, const Halves v, u16* q16, u16* k16, int heads, const float* q_norm, const float* k_norm, float eps, int rope, const float2* angles,
                                   const Cache cache) {
    allow_next();
    wait_previous();
    norm_rope_store(rows, q, k, v, q16, k16, heads, q_norm, k_norm, eps, rope, angles, cache);
}

extern __shared__ uint4 shared_bytes[];

// 16 keys from `base` on, of which first..last (exclusive) count. kv: keys g and 8 + g, a lane's 32 dimensions; vv: values of keys
// 2t, 2t + 1, 2t + 8, 2t + 9, a lane's 16 dimensions.
__device__ __forceinline__ void flash_step(Flash& s, const u32 q[8][4], const uint4 kv[2][4], const uint4 vv[4][2], u32 base, u32 first, u32 last, float scale) {
    const int t = threadIdx.x & 3;
    float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        const u32* w = (const u32*)kv[tile];
#pragma unroll
        for (int step = 0; step < 8; ++step) mma(c[tile], q[step][0], q[step][1], q[step][2], q[step][3], w[2 * step], w[2 * step + 1]);
    }
    float top[2] = {-1.0e30f, -1.0e30f};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 key = base + tile * 8 + 2 * t + (i & 1);
            c[tile][i] = key < last && key >= first ? c[tile][i] * scale : -1.0e30f;
            top[i >> 1] = fmaxf(top[i >> 1], c[tile][i]);
        }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
        float next = fmaxf(s.max[r], top[r]), shrink = __expf(s.max[r] - next);
        s.max[r] = next;
        s.sum[r] *= shrink;
#pragma unroll
        for (int j = 0; j < 16; ++j) { s.o[j][2 * r] *= shrink; s.o[j][2 * r + 1] *= shrink; }
    }
    float p[2][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[tile][i] = __expf(c[tile][i] - s.max[i >> 1]);
            s.sum[i >> 1] += p[tile][i];
        }
    u32 a[4] = {floats_to_half2(p[0][0], p[0][1]), floats_to_half2(p[0][2], p[0][3]), floats_to_half2(p[1][0], p[1][1]), floats_to_half2(p[1][2], p[1][3])};
    const u32 *v0 = (const u32*)vv[0], *v1 = (const u32*)vv[1], *v2 = (const u32*)vv[2], *v3 = (const u32*)vv[3];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        mma(s.o[2 * j], a[0], a[1], a[2], a[3], pack_low(v0[j], v1[j]), pack_low(v2[j], v3[j]));
        mma(s.o[2 * j + 1], a[0], a[1], a[2], a[3], pack_high(v0[j], v1[j]), pack_high(v2[j], v3[j]));
    }
}

// Keys first..last (exclusive) straight from the cache, 16 a step, `stride` apart.
__device__ __forceinline__ void flash(Flash& s, const u32 q[8][4], const Plane k, const Plane v, const Cache& cache, u32 first, u32 last, u32 begin, u32 stride, float scale) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (u32 base = begin; base < last; base += stride) {
        uint4 kv[2][4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            u32 key = base + tile * 8 + g;
            key = key < last ? key : last - 1;
#ifdef KV_Q8_0
            read_pieces<4>(kv[tile], k, (u64)row_of(cache, key) * cache.width + t * 32);
#else
            const uint4* p = (const uint4*)(k + (u64)row_of(cache, key) * cache.width + t * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) kv[tile][i] = p[i];
#endif
        }
        uint4 vv[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 key = base + 2 * t + (i & 1) + (i >> 1) * 8;
            key = key < last ? key : last - 1;
#ifdef KV_Q8_0
            read_pieces<2>(vv[i], v, (u64)row_of(cache, key) * cache.width + g * 16);
#else
            const uint4* p = (const uint4*)(v + (u64)row_of(cache, key) * cache.width + g * 16);
            vv[i][0] = p[0];
            vv[i][1] = p[1];
#endif
        }
        flash_step(s, q, kv, vv, base, first, last, scale);
    }
    finish(s);
}

__device__ __forceinline__ void load_queries(u32 q[8][4], const u16* q16, int group) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int head = g + (i & 1) * 8;
            q[step][i] = head < group ? *(const u32*)(q16 + head * HD + t * 32 + step * 4 + (i >> 1) * 2) : 0;
        }
}

#define KEYS 32   // no more than a ring holds
#define PAIR 2   // query rows of a warp
#define BLOCK_ROWS (8 * PAIR)

// KEYS keys out of shared memory (see fetch in attend_rows for where their pieces stand) for both rows of a warp, so that what is read
// serves twice. q: the rows' queries, as the A operands of 8 steps each. Maxima stay in units of the raw product.
__device__ __forceinline__ void flash_shared(Flash s[PAIR], u32 q, const uint4* k, const uint4* v, u32 base, const u32 first[PAIR], const u32 last[PAIR], float unit, u32 lane) {
    const u32 g = lane >> 2, t = lane & 3;
    float c[PAIR][KEYS / 8][4];
#pragma unroll
    for (int m = 0; m < PAIR; ++m)
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; ++tile) c[m][tile][0] = c[m][tile][1] = c[m][tile][2] = c[m][tile][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint4 a[PAIR][2];
#pragma unroll
        for (int m = 0; m < PAIR; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) a[m][j] = lds128(q + (m * 8 + 2 * i + j) * 512);
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; ++tile) {
            uint4 w = k[(tile * 8 + g) * 16 + ((i * 4 + t) ^ ((g & 1) * 4))];
#pragma unroll
            for (int m = 0; m < PAIR; ++m) {
                mma(c[m][tile], a[m][0].x, a[m][0].y, a[m][0].z, a[m][0].w, w.x, w.y);
                mma(c[m][tile], a[m][1].x, a[m][1].y, a[m][1].z, a[m][1].w, w.z, w.w);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < PAIR; ++m) weigh(s[m], c[m], base, first[m], last[m], unit);
#pragma unroll
    for (int part = 0; part < KEYS / 16; ++part) {
        u32 a[PAIR][4];
#pragma unroll
        for (int m = 0; m < PAIR; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][i] = small_half2(c[m][2 * part + (i >> 1)][2 * (i & 1)], c[m][2 * part + (i >> 1)][2 * (i & 1) + 1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint4 w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int key = part * 16 + 2 * t + (i & 1) + (i >> 1) * 8;
                w[i] = v[key * 16 + ((2 * g + h) ^ ((key >> 1) & 1) ^ (key & 4))];
            }
            const u32 *v0 = (const u32*)&w[0], *v1 = (const u32*)&w[1], *v2 = (const u32*)&w[2], *v3 = (const u32*)&w[3];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int o = 2 * (4 * h + j);
                const u32 b[4] = {pack_low(v0[j], v1[j]), pack_low(v2[j], v3[j]), pack_high(v0[j], v1[j]), pack_high(v2[j], v3[j])};
#pragma unroll
                for (int m = 0; m < PAIR; ++m) {
                    mma(s[m].o[o], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma(s[m].o[o + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
    }
}

// What a warp found for the `group` heads of a row, gated, 16 dimensions of a head at once.
__device__ __forceinline__ void leave(const Flash& s, int group, const u16* gate, u16* out) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = g + 8 * r;
        if (head >= group) continue;
        const float inv = 1.0f / s.sum[r];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const u32 at = head * HD + 16 * (2 * t + c);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                uint4 w = gate ? *(const uint4*)(gate + at + part * 8) : make_uint4(0, 0, 0, 0), to;
                u32 *in = (u32*)&w, *words = (u32*)&to;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float x = s.o[part * 8 + 2 * j][2 * r + c] * inv, y = s.o[part * 8 + 2 * j + 1][2 * r + c] * inv;
                    if (gate) {
                        x *= 1.0f / (1.0f + __expf(-half_to_float((u16)in[j])));
                        y *= 1.0f / (1.0f + __expf(-half_to_float((u16)(in[j] >> 16))));
                    }
                    words[j] = floats_to_half2(x, y);
                }
                *(uint4*)(out + at + part * 8) = to;
            }
        }
    }
}

// What a part of the keys gave the `group` heads of a row, for attend_rows_join: 16 dimensions of a head at once, then (max, sum) of each,
// the maximum times `unit`, so that powers of two tell weights.
__device__ __forceinline__ void leave_part(const Flash& s, int group, float unit, float* part) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = g + 8 * r;
        if (head >= group) continue;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float4* to = (float4*)(part + head * HD + 16 * (2 * t + c));
#pragma unroll
            for (int j = 0; j < 4; ++j) to[j] = make_float4(s.o[4 * j][2 * r + c], s.o[4 * j + 1][2 * r + c], s.o[4 * j + 2][2 * r + c], s.o[4 * j + 3][2 * r + c]);
        }
        if (t == 0) *(float2*)(part + 16 * HD + 2 * head) = make_float2(s.max[r] * unit, s.sum[r]);
    }
}
// Prefill: a warp two rows, sixteen neighbouring rows a block, the last rows (which see most) first. grid: (kv_heads, ceil(rows / 16), parts),
// 256 threads. Rows of one run read each key once, through shared memory, KEYS at a time, the next on their way. Where there are several parts, each
// has its share of the keys and leaves what it found in `partial`.
// Shared: queries of 8 warps, 8 KB each, then two stages of keys and values.
extern "C" __global__ void __launch_bounds__(256) attend_rows(const Row* rows, int n, const u16* q16, int heads, const Cache cache, int block, float scale, const Halves gate, u16* out, float* partial) {
    allow_next();
    wait_previous();
    const int warp = threadIdx.x >> 5, group = heads / cache.kv_heads, kv_head = blockIdx.x;
    const int r0 = (gridDim.y - 1 - blockIdx.y) * BLOCK_ROWS, last_row = r0 + BLOCK_ROWS <= n ? r0 + BLOCK_ROWS - 1 : n - 1, mine = r0 + PAIR * warp;
    const Row low = rows[r0], high = rows[last_row];
    auto leave_row = [&](const Flash& s, int row, float unit) {
        if (row >= n) return;
        if (gridDim.z > 1) leave_part(s, group, unit, partial + ((u64)(row * cache.kv_heads + kv_head) * gridDim.z + blockIdx.z) * PART);
        else leave(s, group, gate.p ? gate.p + row * gate.stride + kv_head * group * HD : 0, out + ((u64)row * heads + kv_head * group) * HD);
    };
    if (low.slot != high.slot || high.pos - low.pos != (u32)(last_row - r0)) {
#pragma unroll 1
        for (int m = 0; m < PAIR; ++m) {
            const int at = mine + m < n ? mine + m : n - 1;
            const Row row = rows[at];
            u32 first, last, q[8][4];
            visible(row, cache, block, first, last);
            part_of_keys(first, last, blockIdx.z, gridDim.z, KEYS);
            load_queries(q, q16 + ((u64)at * heads + kv_head * group) * HD, group);
            Flash s;
            clear(s);
            flash(s, q, PLANE(cache.k, row.slot, kv_head), PLANE(cache.v, row.slot, kv_head), cache, first, last, first & ~15u, 16, scale);
            leave_row(s, mine + m, 1.4426950408889634f);
        }
        return;
    }
    uint4* tiles = shared_bytes + 8 * PAIR * 256;   // stage; K and V; 16 pieces of 16 bytes a key
    const u32 q_at = (u32)__cvta_generic_to_shared(shared_bytes) + warp * PAIR * 4096 + (threadIdx.x & 31) * 16;
    u32 first[PAIR], last[PAIR], from, to, other;
    Flash s[PAIR];
#pragma unroll
    for (int m = 0; m < PAIR; ++m) {
        const int at = mine + m < n ? mine + m : n - 1;
        u32 q[8][4];
        load_queries(q, q16 + ((u64)at * heads + kv_head * group) * HD, group);
#pragma unroll
        for (int step = 0; step < 8; ++step) shared_bytes[((warp * PAIR + m) * 8 + step) * 32 + (threadIdx.x & 31)] = make_uint4(q[step][0], q[step][1], q[step][2], q[step][3]);
        visible(rows[at], cache, block, first[m], last[m]);
        clear(s[m]);
    }
    visible(low, cache, block, from, other);
    visible(high, cache, block, other, to);
    part_of_keys(from, to, blockIdx.z, gridDim.z, KEYS);
    from &= ~15u;
#ifdef KV_Q8_0
    const u32 slot = low.slot;
#else
    const Plane k = PLANE(cache.k, low.slot, kv_head);
    const Plane v = PLANE(cache.v, low.slot, kv_head);
#endif
    const float unit = scale * 1.4426950408889634f;   // exp(x * scale) = 2^(x * unit)
    // A thread copies the same piece of two keys of every KEYS; their place in the cache advances with them. What a ring that has
    // turned holds behind the last key is masked; else the last key is read again: a short context's ring ends there. Pieces stand where the lanes of a quarter warp read eight different banks.
    const u32 tid = threadIdx.x, key = tid >> 4, c = tid & 15, wraps = cache.window ? cache.capacity : ~0u, limit = cache.window && to > cache.capacity ? ~0u : to - 1;
    const u32 k_at = key * 16 + (((c & 3) * 4 + (c >> 2)) ^ ((key & 1) * 4)), v_at = key * 16 + (c ^ ((key >> 1) & 1) ^ (key & 4)) + KEYS * 16;
    u32 next = row_of(cache, from + key);
#ifdef KV_Q8_0
    // Bytes on their way, of which `settle` makes halves where f16 would be copied; the factors of a key are copied behind the tiles.
    u16* const factors = (u16*)(tiles + 4 * KEYS * 16);
    uint2 k_bytes[2], v_bytes[2];
    auto fetch = [&](int) {
        const Plane k = PLANE(cache.k, keep(slot), kv_head), v = PLANE(cache.v, slot, kv_head);
        const u32 tid = keep(threadIdx.x), to = (u32)__cvta_generic_to_shared(factors + (tid >> 4) * 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 row = next + i * 16;
            if (row >= wraps) row -= wraps;
            const u64 at = (u64)(row < limit ? row : limit) * cache.width;
            k_bytes[i] = *(const uint2*)(k.at + at + (tid & 15) * 8);
            v_bytes[i] = *(const uint2*)(v.at + at + (tid & 15) * 8);
            if (tid & 15) continue;
            copy8_near(to + i * 128, k.factors + at / 32);
            copy8_near(to + i * 128 + KEYS * 8, v.factors + at / 32);
        }
        next += KEYS;
        if (next >= wraps) next -= wraps;
        commit();
    };
    auto settle = [&](int stage) {
        arrived<0>();
        __syncwarp();   // what a lane waited for, the sixteen of its key read
        const u32 tid = keep(threadIdx.x), key = tid >> 4, c = tid & 15;
        uint4* to = tiles + stage * 2 * KEYS * 16 + key * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u16* f = factors + (i * 16 + key) * 4 + (c >> 2);
            to[i * 256 + (((c & 3) * 4 + (c >> 2)) ^ ((key & 1) * 4))] = values8(k_bytes[i], f[0]);
            to[i * 256 + KEYS * 16 + (c ^ ((key >> 1) & 1) ^ (key & 4))] = values8(v_bytes[i], f[KEYS * 4]);
        }
    };
#else
    auto settle = [](int) {};
    auto fetch = [&](int stage) {
        const u32 to_stage = (u32)__cvta_generic_to_shared(tiles + stage * 2 * KEYS * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 row = next + i * 16;
            if (row >= wraps) row -= wraps;
            const u64 at = (u64)(row < limit ? row : limit) * cache.width + c * 8;
            copy16_near(to_stage + (i * 256 + k_at) * 16, k + at);
            copy16_near(to_stage + (i * 256 + v_at) * 16, v + at);
        }
        next += KEYS;
        if (next >= wraps) next -= wraps;
        commit();
    };
#endif
    int stage = 0;
    if (from < to) {
        fetch(0);
        settle(0);
    }
#pragma unroll 1
    for (u32 base = from; base < to; base += KEYS, stage ^= 1) {
        arrived<0>();
        // Keys are there for all warps, and all are done with those before, whose place is free.
        __syncthreads();
        if (base + KEYS < to) fetch(stage ^ 1);
        if (base < last[PAIR - 1] && base + KEYS > first[0])
            flash_shared(s, keep(q_at), tiles + stage * 2 * KEYS * 16, tiles + (stage * 2 + 1) * KEYS * 16, base, first, last, unit, tid & 31);
        if (base + KEYS < to) settle(stage ^ 1);
    }
#pragma unroll
    for (int m = 0; m < PAIR; ++m) {
        finish(s[m]);
        leave_row(s[m], mine + m, unit);
    }
}

#define AT_ONCE 8
// Joins the parts of rows whose keys were split, and applies the gate. grid: (kv_heads, rows), 256 threads: eight dimensions of one of 16 heads each.
extern "C" __global__ void __launch_bounds__(256) attend_rows_join(const float* partial, u32 parts, int heads, const Cache cache, const Halves gate, u16* out) {
    allow_next();
    const int group = heads / cache.kv_heads, head = threadIdx.x >> 4, dim = (threadIdx.x & 15) * 8;
    const float* from = partial + (u64)(blockIdx.y * cache.kv_heads + blockIdx.x) * parts * PART;
    wait_previous();
    if (head >= group) return;
    float top = -1.0e30f, sum = 0.0f;
    float4 x[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll 1
    for (u32 first = 0; first < parts; first += AT_ONCE) {
        // All that these parts left is on its way before any of it is used.
        float2 of[AT_ONCE];
        float4 y[AT_ONCE][2];
#pragma unroll
        for (u32 z = 0; z < AT_ONCE; ++z) {
            const float* part = from + (first + z < parts ? first + z : parts - 1) * PART;
            of[z] = *(const float2*)(part + 16 * HD + 2 * head);
#pragma unroll
            for (int i = 0; i < 2; ++i) y[z][i] = *(const float4*)(part + head * HD + dim + 4 * i);
        }
        float next = top;
#pragma unroll
        for (u32 z = 0; z < AT_ONCE; ++z) next = fmaxf(next, of[z].x);
        const float shrink = exp2_fast(top - next);
        top = next;
        sum *= shrink;
#pragma unroll
        for (int i = 0; i < 2; ++i) x[i] = scale4(x[i], shrink);
#pragma unroll
        for (u32 z = 0; z < AT_ONCE; ++z) {
            const float weight = first + z < parts ? exp2_fast(of[z].x - top) : 0.0f;
            sum += weight * of[z].y;
#pragma unroll
            for (int i = 0; i < 2; ++i) x[i] = add4(x[i], scale4(y[z][i], weight));
        }
    }
    const u32 at = (blockIdx.x * group + head) * HD + dim;
    const float inv = 1.0f / sum;
    uint4 w = gate.p ? *(const uint4*)(gate.p + blockIdx.y * gate.stride + at) : make_uint4(0, 0, 0, 0);
    u32* const words = (u32*)&w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 y = i & 1 ? make_float2(x[i >> 1].z, x[i >> 1].w) : make_float2(x[i >> 1].x, x[i >> 1].y);
        y = make_float2(y.x * inv, y.y * inv);
        if (gate.p) {
            y.x *= 1.0f / (1.0f + __expf(-half_to_float((u16)words[i])));
            y.y *= 1.0f / (1.0f + __expf(-half_to_float((u16)(words[i] >> 16))));
        }
        words[i] = floats_to_half2(y.x, y.y);
    }
    *(uint4*)(out + (u64)blockIdx.y * heads * HD + at) = w;
}
