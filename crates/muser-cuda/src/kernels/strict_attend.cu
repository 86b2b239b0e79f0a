// Heads of the strict lane: norm and rotation, the cache, attention.
// Layout: scores are a thread each, 32 keys of a tile against a head; then the 32 lanes of the contract's sums are blocks of their
// own, four heads at a time; a last kernel folds them. Bytes: keys once for all heads of a KV head, values once for four.
// Operations: 128 multiply-adds and 31 sums a score, 128 multiply-adds a value.

// A norm a head, then rotation, in place; heads of q, then those of k. grid: (rows, heads + kv heads), one warp. rope: 0 none,
// 1 pairs (2i, 2i + 1), 2 pairs (i, i + 64).
extern "C" __global__ void strict_qk(const Row* rows, float* q, float* k, u32 heads, const float* q_weight, const float* k_weight, float eps, int rope,
                                     const float2* angles) {
    const u32 kv_heads = gridDim.y - heads;
    const bool query = blockIdx.y < heads;
    float* head = (query ? q + ((u64)blockIdx.x * heads + blockIdx.y) * HD : k + ((u64)blockIdx.x * kv_heads + blockIdx.y - heads) * HD);
    const float* weight = query ? q_weight : k_weight;
    const int lane = threadIdx.x;
    float acc = 0.0f, v[4], other[4];
    allow_next();
    wait_previous();
    const float2* angle = angles + (u64)rows[blockIdx.x].pos * (HD / 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = head[lane + 32 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) acc = __fmaf_rn(v[i], v[i], acc);
    float f = factor_of(acc, HD, eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = v[i] * f * weight[lane + 32 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) other[i] = rope == 1 ? __shfl_xor_sync(0xffffffffu, v[i], 1) : v[i ^ 2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int e = lane + 32 * i;
        bool second = rope == 1 ? e & 1 : i >= 2;
        float2 turn = angle[rope == 1 ? e / 2 : e & 63];
        float a = second ? other[i] : v[i], b = second ? v[i] : other[i];
        float y = second ? __fmaf_rn(a, turn.y, b * turn.x) : __fmaf_rn(a, turn.x, -(b * turn.y));
        head[e] = rope ? y : v[i];
    }
}

// Keys and values to the cache, rounded to nearest even. grid: (rows), 256 threads.
extern "C" __global__ void strict_store(const Row* rows, const float* k, const float* v, const Cache cache) {
    allow_next();
    wait_previous();
    const Row row = rows[blockIdx.x];
    u64 to = (u64)row_of(cache, row.pos) * cache.width, from = (u64)blockIdx.x * cache.width;
    for (u32 i = threadIdx.x; i < cache.width; i += 256) {
        ((u16**)cache.k)[row.slot][to + i] = round_half(k[from + i]);
        ((u16**)cache.v)[row.slot][to + i] = round_half(v[from + i]);
    }
}

// Positions that a row sees.
struct Seen {
    u32 first, keys;
};
__device__ __forceinline__ Seen seen(const Row& row, const Cache& c, int block) {
    u32 first = c.window && row.pos + 1 > c.window ? row.pos + 1 - c.window : 0;
    return {first, (block ? row.end : row.pos) + 1 - first};
}

// Where the scores of a launch stand: `span` for each head and row, key j in lane j % 32 at place j / 32 of it; the greatest of each
// 32; then, of every lane, the sums for HD values and that of weights.
struct Scratch {
    float *scores, *tops, *values, *sums;
    u32 span, heads;
};

// Products of a query with the elements 8 * octet .. 8 * octet + 7 of every 32: eight lanes of the contract.
__device__ __forceinline__ void octet_of(const float* q, const u8* key, int octet, float* acc) {
#pragma unroll
    for (int e = 0; e < 8; ++e) acc[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint4 k = *(const uint4*)(key + (i * 4 + octet) * 16);
        float4 a = *(const float4*)(q + i * 32 + octet * 8), b = *(const float4*)(q + i * 32 + octet * 8 + 4);
        acc[0] = __fmaf_rn(a.x, half_to_float((u16)k.x), acc[0]);
        acc[1] = __fmaf_rn(a.y, half_to_float((u16)(k.x >> 16)), acc[1]);
        acc[2] = __fmaf_rn(a.z, half_to_float((u16)k.y), acc[2]);
        acc[3] = __fmaf_rn(a.w, half_to_float((u16)(k.y >> 16)), acc[3]);
        acc[4] = __fmaf_rn(b.x, half_to_float((u16)k.z), acc[4]);
        acc[5] = __fmaf_rn(b.y, half_to_float((u16)(k.z >> 16)), acc[5]);
        acc[6] = __fmaf_rn(b.z, half_to_float((u16)k.w), acc[6]);
        acc[7] = __fmaf_rn(b.w, half_to_float((u16)(k.w >> 16)), acc[7]);
    }
}

// Scores of 32 keys with all heads of a KV head. grid: (tiles of keys, kv heads, rows), 256 threads: a warp takes every eighth head;
// shared memory: the queries.
#define KEY_BYTES (HD * 2 + 16)
extern "C" __global__ void __launch_bounds__(256) strict_scores(const Row* rows, const float* q, const Cache cache, int block, float scale, const Scratch s) {
    __shared__ uint4 tile[32 * KEY_BYTES / 16];
    allow_next();
    wait_previous();
    const Row row = rows[blockIdx.z];
    const Seen see = seen(row, cache, block);
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = s.heads / cache.kv_heads, base = blockIdx.x * 32;
    if (base >= see.keys) return;
    const u16* keys = ((u16**)cache.k)[row.slot] + blockIdx.y * HD;
    const u64 first = (u64)blockIdx.z * s.heads + blockIdx.y * group;
    float4* queries = (float4*)shared_bytes;
    for (u32 i = threadIdx.x; i < group * HD / 4; i += 256) queries[i] = ((const float4*)(q + first * HD))[i];
#pragma unroll
    for (u32 i = threadIdx.x; i < 32 * 16; i += 256) {
        u32 j = i >> 4;
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (base + j < see.keys) piece = *(const uint4*)(keys + (u64)row_of(cache, see.first + base + j) * cache.width + (i & 15) * 8);
        tile[j * (KEY_BYTES / 16) + (i & 15)] = piece;
    }
    __syncthreads();
    const u8* key = (const u8*)tile + lane * KEY_BYTES;
    for (u32 h = warp; h < group; h += 8) {
        const u64 head = first + h;
        const float* mine = (const float*)queries + h * HD;
        // Lanes 0..7 with 16..23, then 8..15 with 24..31, then both, then within.
        float sum[8], more[8], part[8];
        octet_of(mine, key, 0, sum);
        octet_of(mine, key, 2, part);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += part[e];
        octet_of(mine, key, 1, more);
        octet_of(mine, key, 3, part);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += more[e] + part[e];
#pragma unroll
        for (int d = 4; d > 0; d >>= 1)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (e < d) sum[e] += sum[e + d];
        float score = sum[0] * scale, top = __uint_as_float(0xff800000);
        if (base + lane < see.keys) {
            s.scores[head * s.span + lane * (s.span / 32) + blockIdx.x] = score;
            top = fmaxf(top, score);
        }
        top = warp_max(top);
        if (lane == 0) s.tops[head * (s.span / 32) + blockIdx.x] = top;
    }
}

// One lane's sums of four heads: weights, and weights times values. grid: (32 lanes, kv heads * fours of heads, rows), 64 threads with
// two elements each.
#define TURN 64
extern "C" __global__ void __launch_bounds__(64) strict_values(const Row* rows, const Cache cache, int block, const Scratch s) {
    __shared__ uint4 values[TURN * HD / 8];
    __shared__ float4 weights[TURN];
    __shared__ float tops[2][4];
    allow_next();
    wait_previous();
    const Row row = rows[blockIdx.z];
    const Seen see = seen(row, cache, block);
    const u32 group = s.heads / cache.kv_heads, fours = (group + 3) / 4, kv = blockIdx.y / fours, h = blockIdx.y % fours * 4, live = group - h < 4 ? group - h : 4;
    const u32 lane = blockIdx.x, places = s.span / 32, tiles = (see.keys + 31) / 32, mine = see.keys > lane ? (see.keys - lane + 31) / 32 : 0;
    const u64 head = (u64)blockIdx.z * s.heads + kv * group + h;
    float top[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        top[i] = __uint_as_float(0xff800000);
        if (i < live)
            for (u32 t = threadIdx.x; t < tiles; t += 64) top[i] = fmaxf(top[i], s.tops[(head + i) * places + t]);
        top[i] = warp_max(top[i]);
        if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5][i] = top[i];
    }
    __syncthreads();
    float total[4], y[4][2];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        top[i] = fmaxf(tops[0][i], tops[1][i]);
        total[i] = y[i][0] = y[i][1] = 0.0f;
    }
    // A thread copies 16 bytes of every fourth key of this lane.
    const u32 t = threadIdx.x, to = __cvta_generic_to_shared(values);
    const u16* from = ((u16**)cache.v)[row.slot] + kv * HD + (t & 15) * 8;
    for (u32 turn = 0; turn < mine; turn += TURN) {
        const u32 count = mine - turn < TURN ? mine - turn : TURN;
        __syncthreads();
#pragma unroll 4
        for (u32 j = t >> 4; j < count; j += 4) copy16_near(to + (j * 16 + (t & 15)) * 16, from + (u64)row_of(cache, see.first + lane + 32 * (turn + j)) * cache.width);
        commit();
        if (t < count) {
            float e[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) e[i] = i < live ? strict_exp(s.scores[(head + i) * s.span + lane * places + turn + t] - top[i]) : 0.0f;
            weights[t] = make_float4(e[0], e[1], e[2], e[3]);
        }
        arrived<0>();
        __syncthreads();
#pragma unroll 4
        for (u32 j = 0; j < count; ++j) {
            const u32 v = ((const u32*)values)[j * (HD / 2) + t];
            const float4 w = weights[j];
            const float a = half_to_float((u16)v), b = half_to_float((u16)(v >> 16)), e[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                total[i] += e[i];
                y[i][0] = __fmaf_rn(e[i], a, y[i][0]);
                y[i][1] = __fmaf_rn(e[i], b, y[i][1]);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u64 place = (head + i) * 32 + lane;
        if (i < live) ((float2*)s.values)[place * (HD / 2) + t] = make_float2(y[i][0], y[i][1]);
        if (i < live && t == 0) s.sums[place] = total[i];
    }
}

// Folds the lanes of a head and gates it. grid: (heads, rows), 128 threads.
extern "C" __global__ void __launch_bounds__(HD) strict_join(const Scratch s, const float* gate, float* out) {
    allow_next();
    wait_previous();
    const u64 head = (u64)blockIdx.y * s.heads + blockIdx.x, at = head * HD + threadIdx.x;
    float lanes[32], total = fold(s.sums[head * 32 + (threadIdx.x & 31)]);
#pragma unroll
    for (int i = 0; i < 32; ++i) lanes[i] = s.values[(head * 32 + i) * HD + threadIdx.x];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i < d) lanes[i] += lanes[i + d];
    float y = lanes[0] / total;
    if (gate) y *= 1.0f / (1.0f + strict_exp(-gate[at]));
    out[at] = y;
}
