// QK-norm, rotation, KV store, attention and its gate, for heads of 128.
// Layout: K and V of a cache are token-major rows of f16; position p stands in row p % capacity.
// A warp multiplies the (up to 16) query heads of one KV head with 16 keys a step on tensor cores (m16n8k16); dimensions are
// permuted alike on both sides, so that every lane reads whole 16-byte pieces of K and V straight from memory.
// Bytes: visible keys and values, once. Memory binds at depth, latency before.
struct Cache {
    u64 k, v;   // per slot: tables of base addresses, u16*
    u32 capacity, window, kv_heads, width;   // window 0: none
};
#define HD 128

__device__ __forceinline__ u32 row_of(const Cache& c, u32 pos) { return c.window ? pos % c.capacity : pos; }

// One warp a head. grid: (rows, heads + 2 * kv_heads) warps of 32. q heads are normed, rotated, kept f32 and f16; K is stored; V is stored.
extern "C" __global__ void qk_norm_rope_store(const Row* rows, float* q, float* k, const float* v, int heads, const float* q_norm, const float* k_norm, float eps,
                                              int rope, const float2* angles, const Cache cache, u16* q16) {
    allow_next();
    wait_previous();
    const Row row = rows[blockIdx.x];
    int head = blockIdx.y, lane = threadIdx.x;
    int kind = head < heads ? 0 : head < heads + (int)cache.kv_heads ? 1 : 2;
    int at = kind == 0 ? head : kind == 1 ? head - heads : head - heads - (int)cache.kv_heads;
    int count = kind == 0 ? heads : (int)cache.kv_heads;
    const float* from = kind == 0 ? q : kind == 1 ? k : v;
    from += ((u64)blockIdx.x * count + at) * HD;
    // Lane holds elements 2l, 2l+1 (pairs interleaved) and 64+2l, 65+2l; halves pair element i with i + 64.
    float2 a = ((const float2*)from)[lane], b = ((const float2*)from)[32 + lane];
    if (kind < 2) {
        float f = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) / (float)HD + eps);
        const float* w = kind == 0 ? q_norm : k_norm;
        float2 wa = ((const float2*)w)[lane], wb = ((const float2*)w)[32 + lane];
        a = make_float2(a.x * f * wa.x, a.y * f * wa.y);
        b = make_float2(b.x * f * wb.x, b.y * f * wb.y);
        const float2* angle = angles + (u64)row.pos * (HD / 2);
        if (rope == 1) {
            float2 ca = angle[lane], cb = angle[32 + lane];
            a = make_float2(a.x * ca.x - a.y * ca.y, a.x * ca.y + a.y * ca.x);
            b = make_float2(b.x * cb.x - b.y * cb.y, b.x * cb.y + b.y * cb.x);
        } else if (rope == 2) {
            float2 c0 = angle[2 * lane], c1 = angle[2 * lane + 1], x = a, y = b;
            a = make_float2(x.x * c0.x - y.x * c0.y, x.y * c1.x - y.y * c1.y);
            b = make_float2(x.x * c0.y + y.x * c0.x, x.y * c1.y + y.y * c1.x);
        }
        float2* back = (float2*)from;
        back[lane] = a;
        back[32 + lane] = b;
    }
    u16* to;
    if (kind == 0) {
        to = q16 + ((u64)blockIdx.x * heads + at) * HD;
    } else {
        u16* base = ((u16**)(kind == 1 ? cache.k : cache.v))[row.slot];
        to = base + (u64)row_of(cache, row.pos) * cache.width + at * HD;
    }
    ((u32*)to)[lane] = floats_to_half2(a.x, a.y);
    ((u32*)to)[32 + lane] = floats_to_half2(b.x, b.y);
}

__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack_low(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 pack_high(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// State of one warp: 16 query heads of one KV head.
struct Flash {
    float max[2], sum[2], o[16][4];   // rows g and g + 8; tile j holds dimensions 16 * column + j
};

// Keys first..last (exclusive), 16 a step, `stride` steps apart.
__device__ __forceinline__ void flash(Flash& s, const u32 q[8][4], const u16* k, const u16* v, const Cache& cache, u32 first, u32 last, u32 begin, u32 stride, float scale) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (u32 base = begin; base < last; base += stride) {
        float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        uint4 kv[2][4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            u32 key = base + tile * 8 + g;
            key = key < last ? key : last - 1;
            const uint4* p = (const uint4*)(k + (u64)row_of(cache, key) * cache.width + t * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) kv[tile][i] = p[i];
        }
        uint4 vv[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 key = base + 2 * t + (i & 1) + (i >> 1) * 8;
            key = key < last ? key : last - 1;
            const uint4* p = (const uint4*)(v + (u64)row_of(cache, key) * cache.width + g * 16);
            vv[i][0] = p[0];
            vv[i][1] = p[1];
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const u32* w = (const u32*)kv[tile];
#pragma unroll
            for (int step = 0; step < 8; ++step) mma(c[tile], q[step], w[2 * step], w[2 * step + 1]);
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
            mma(s.o[2 * j], a, pack_low(v0[j], v1[j]), pack_low(v2[j], v3[j]));
            mma(s.o[2 * j + 1], a, pack_high(v0[j], v1[j]), pack_high(v2[j], v3[j]));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        s.sum[r] += __shfl_xor_sync(0xffffffffu, s.sum[r], 1);
        s.sum[r] += __shfl_xor_sync(0xffffffffu, s.sum[r], 2);
    }
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

__device__ __forceinline__ void visible(const Row& row, const Cache& cache, int block, u32& first, u32& last) {
    first = cache.window && row.pos + 1 > cache.window ? row.pos + 1 - cache.window : 0;
    last = (block ? row.end : row.pos) + 1;
}

__device__ __forceinline__ void clear(Flash& s) {
    s.max[0] = s.max[1] = -1.0e30f;
    s.sum[0] = s.sum[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) s.o[j][0] = s.o[j][1] = s.o[j][2] = s.o[j][3] = 0.0f;
}

// Decode: keys are split over blocks and their 4 warps. grid: (splits, kv_heads, rows), 128 threads.
// partial: [row][kv_head][split * 4 + warp][16 heads] of (max, sum, 128 values).
extern "C" __global__ void __launch_bounds__(128) attend_split(const Row* rows, const u16* q16, int heads, const Cache cache, int block, float scale, float* partial) {
    allow_next();
    wait_previous();
    const Row row = rows[blockIdx.z];
    int group = heads / cache.kv_heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u32 first, last;
    visible(row, cache, block, first, last);
    u32 begin = first & ~15u, steps = (last - begin + 15) / 16, warps = gridDim.x * 4, mine = blockIdx.x * 4 + warp;
    u32 q[8][4];
    load_queries(q, q16 + ((u64)blockIdx.z * heads + blockIdx.y * group) * HD, group);
    Flash s;
    clear(s);
    const u16* k = ((u16**)cache.k)[row.slot] + blockIdx.y * HD;
    const u16* v = ((u16**)cache.v)[row.slot] + blockIdx.y * HD;
    if (mine < steps) flash(s, q, k, v, cache, first, last, begin + mine * 16, warps * 16, scale);
    float* out = partial + (((u64)blockIdx.z * cache.kv_heads + blockIdx.y) * warps + mine) * 16 * (HD + 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float* to = out + (g + 8 * r) * (HD + 2);
        if (g + 8 * r >= group) continue;
        if (t == 0) { to[0] = s.max[r]; to[1] = s.sum[r]; }
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) to[2 + 16 * (2 * t + c) + j] = s.o[j][2 * r + c];
    }
}

// Joins the partial results of a head, applies the gate, quantises. grid: (heads, rows), 128 threads.
extern "C" __global__ void __launch_bounds__(128) attend_join(const float* partial, int heads, int kv_heads, int parts, const float* gate, const Activation out) {
    allow_next();
    wait_previous();
    int head = blockIdx.x, group = heads / kv_heads, d = threadIdx.x;
    const float* from = partial + ((u64)(blockIdx.y * kv_heads + head / group) * parts * 16 + head % group) * (HD + 2);
    float top = -1.0e30f;
    for (int p = 0; p < parts; ++p) top = fmaxf(top, from[(u64)p * 16 * (HD + 2)]);
    float sum = 0.0f, v = 0.0f;
    for (int p = 0; p < parts; ++p) {
        const float* part = from + (u64)p * 16 * (HD + 2);
        if (part[1] == 0.0f) continue;
        float w = __expf(part[0] - top);
        sum += w * part[1];
        v += w * part[2 + d];
    }
    u64 at = ((u64)blockIdx.y * heads + head) * HD;
    v /= sum;
    if (gate) v *= 1.0f / (1.0f + __expf(-gate[at + d]));
    out.f[at + d] = v;
    quantize32(v, at + (d & ~31), d & 31, out);
}

// Prefill: a warp a row, four neighbouring rows a block. grid: (ceil(rows / 4), kv_heads), 128 threads.
extern "C" __global__ void __launch_bounds__(128) attend_rows(const Row* rows, int n, const u16* q16, int heads, const Cache cache, int block, float scale, const float* gate, const Activation out) {
    int r0 = blockIdx.x * 4 + (threadIdx.x >> 5);
    if (r0 >= n) return;
    const Row row = rows[r0];
    int group = heads / cache.kv_heads, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u32 first, last;
    visible(row, cache, block, first, last);
    u32 q[8][4];
    load_queries(q, q16 + ((u64)r0 * heads + blockIdx.y * group) * HD, group);
    Flash s;
    clear(s);
    const u16* k = ((u16**)cache.k)[row.slot] + blockIdx.y * HD;
    const u16* v = ((u16**)cache.v)[row.slot] + blockIdx.y * HD;
    flash(s, q, k, v, cache, first, last, first & ~15u, 16, scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int head = g + 8 * r;
        if (head >= group) continue;
        u64 at = ((u64)r0 * heads + blockIdx.y * group + head) * HD;
        float inv = 1.0f / s.sum[r];
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                u32 e = 16 * (2 * t + c) + j;
                float x = s.o[j][2 * r + c] * inv;
                if (gate) x *= 1.0f / (1.0f + __expf(-gate[at + e]));
                out.f[at + e] = x;
                out.h[at + e] = float_to_half(x);
            }
    }
}
