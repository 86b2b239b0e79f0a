// The strict lane: muser_core::strict, operation by operation. Compiled without contraction (-fmad=false), with IEEE division and
// roots and with denormals, so that every result has the reference's bits.
// Layout: a warp is the contract's 32 lanes; weights stay the file's blocks and are decoded where they are used.
// Bytes: the weights, once for eight rows. Operations: about ten a weight, most of them decoding. Instructions bind.
struct Blocks {
    const u8* w;
    u64 row_bytes;
    int source, rows, cols;   // source: see pack.cu
    float scale;
};
enum { FROM_F32 = 0, FROM_F16 = 1, FROM_BF16 = 2, FROM_Q8_0 = 3, FROM_Q4_0 = 4, FROM_Q4_K = 5, FROM_Q5_K = 6, FROM_Q6_K = 7 };
struct Cache {
    u64 k, v;
    u32 capacity, window, kv_heads, width;
};
#define HD 128

__device__ __forceinline__ float half_at(const u8* p) { return half_to_float((u16)(p[0] | (p[1] << 8))); }

// Scale and minimum of group g of Q4_K and Q5_K.
__device__ __forceinline__ void scale_min(const u8* s, u32 g, float& scale, float& min) {
    int a = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | ((s[g - 4] >> 6) << 4);
    int b = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | ((s[g] >> 6) << 4);
    scale = (float)a;
    min = (float)b;
}

// Element i of a row.
__device__ __forceinline__ float value(int source, const u8* row, u32 i) {
    if (source == FROM_F32) return ((const float*)row)[i];
    if (source == FROM_F16) return half_to_float(((const u16*)row)[i]);
    if (source == FROM_BF16) return bf16_to_float(((const u16*)row)[i]);
    if (source == FROM_Q8_0) {
        const u8* b = row + (u64)(i / 32) * 34;
        return half_at(b) * (float)((i8)b[2 + i % 32]);
    }
    if (source == FROM_Q4_0) {
        const u8* b = row + (u64)(i / 32) * 18;
        u32 j = i % 32;
        return half_at(b) * (float)(((b[2 + (j & 15)] >> (j < 16 ? 0 : 4)) & 15) - 8);
    }
    u32 j = i % 256;
    if (source == FROM_Q6_K) {
        const u8* b = row + (u64)(i / 256) * 210;
        u32 half = j / 128, l = j % 32, part = j % 128 / 32;
        int q = ((b[half * 64 + l + (part & 1) * 32] >> (part >= 2 ? 4 : 0)) & 15) | (((b[128 + half * 32 + l] >> (2 * part)) & 3) << 4);
        return half_at(b + 208) * (float)((i8)b[192 + half * 8 + l / 16 + part * 2]) * (float)(q - 32);
    }
    const u8* b = row + (u64)(i / 256) * (source == FROM_Q4_K ? 144 : 176);
    float scale, min;
    scale_min(b + 4, j / 32, scale, min);
    int q = (b[(source == FROM_Q4_K ? 16 : 48) + j / 64 * 32 + j % 32] >> (j & 32 ? 4 : 0)) & 15;
    if (source == FROM_Q5_K) q |= ((b[16 + j % 32] >> (j / 32)) & 1) << 4;
    return half_at(b) * scale * (float)q - half_at(b + 2) * min;
}

// The eight elements lane, lane + 32, ... of a block of 256 of the commonest type: scales are made once for all lanes.
__device__ __forceinline__ void eight_q4_k(const u8* b, int lane, float* w) {
    float scale, min;
    scale_min(b + 4, lane & 7, scale, min);
    scale = half_at(b) * scale;
    min = half_at(b + 2) * min;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        int q = b[16 + pair * 32 + lane];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float s = __shfl_sync(0xffffffffu, scale, 2 * pair + k), m = __shfl_sync(0xffffffffu, min, 2 * pair + k);
            w[2 * pair + k] = s * (float)(k ? q >> 4 : q & 15) - m;
        }
    }
}

__device__ __forceinline__ float fold(float v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_down_sync(0xffffffffu, v, d);
    return __shfl_sync(0xffffffffu, v, 0);
}
__device__ __forceinline__ float strict_exp(float x) {
    if (x != x) return x;
    if (x > 88.72283f) return __uint_as_float(0x7f800000);
    if (x < -87.33654f) return 0.0f;
    float n = __fmaf_rn(x, 1.44269504088896340736f, 12582912.0f) - 12582912.0f;
    float r = __fmaf_rn(n, -1.4286068e-6f, __fmaf_rn(n, -0.69314575f, x));
    float p = 1.0f / 720.0f;
    p = __fmaf_rn(p, r, 1.0f / 120.0f);
    p = __fmaf_rn(p, r, 1.0f / 24.0f);
    p = __fmaf_rn(p, r, 1.0f / 6.0f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    int half = (int)n >> 1;
    return p * __uint_as_float((u32)(half + 127) << 23) * __uint_as_float((u32)((int)n - half + 127) << 23);
}
__device__ __forceinline__ float strict_tanh(float x) {
    float e = strict_exp(-2.0f * fabsf(x));
    return copysignf((1.0f - e) / (1.0f + e), x);
}
__device__ __forceinline__ float rms_factor(const float* x, u32 n, float eps) {
    float acc = 0.0f;
#pragma unroll 8
    for (u32 i = threadIdx.x & 31; i < n; i += 32) acc = __fmaf_rn(x[i], x[i], acc);
    return 1.0f / __fsqrt_rn(fold(acc) / (float)n + eps);
}

// x = the table's row, normed without weight where eps >= 0. grid: (rows), one warp.
extern "C" __global__ void strict_embed(const Row* rows, const Blocks table, float eps, float* x) {
    wait_previous();
    const u8* row = table.w + (u64)rows[blockIdx.x].token * table.row_bytes;
    float* to = x + (u64)blockIdx.x * table.cols;
    for (u32 i = threadIdx.x; i < (u32)table.cols; i += 32) to[i] = value(table.source, row, i);
    if (eps < 0.0f) return;
    float f = rms_factor(to, table.cols, eps);
    for (u32 i = threadIdx.x; i < (u32)table.cols; i += 32) to[i] *= f;
}

// out = rms(from) * weight. grid: (rows), one warp.
extern "C" __global__ void strict_norm(const float* from, const float* weight, u32 n, float eps, float* out) {
    wait_previous();
    u64 at = (u64)blockIdx.x * n;
    float f = rms_factor(from + at, n, eps);
    for (u32 i = threadIdx.x; i < n; i += 32) out[at + i] = from[at + i] * f * weight[i];
}

// out[c][r] = W[r] . x[c]. grid: ceil(rows / 8), a warp a row of W; activation rows go in eights.
extern "C" __global__ void __launch_bounds__(256) strict_project(const Blocks m, const float* x, int n, float* out) {
    wait_previous();
    int r = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (r >= m.rows) return;
    const u8* row = m.w + (u64)r * m.row_bytes;
    const u32 cols = m.cols;
    for (int first = 0; first < n; first += 8) {
        const int live = n - first < 8 ? n - first : 8;
        const float* from = x + (u64)first * cols;
        float acc[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) acc[c] = 0.0f;
        if (m.source == FROM_Q4_K) {
#pragma unroll 2
            for (u32 b = 0; b < cols / 256; ++b) {
                float w[8];
                eight_q4_k(row + (u64)b * 144, lane, w);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if (c >= live) break;
                    const float* v = from + (u64)c * cols + b * 256 + lane;
#pragma unroll
                    for (int k = 0; k < 8; ++k) acc[c] = __fmaf_rn(w[k], v[k * 32], acc[c]);
                }
            }
        } else {
#pragma unroll 4
            for (u32 i = lane; i < cols; i += 32) {
                float w = value(m.source, row, i);
#pragma unroll
                for (int c = 0; c < 8; ++c)
                    if (c < live) acc[c] = __fmaf_rn(w, from[(u64)c * cols + i], acc[c]);
            }
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            float v = fold(acc[c]);
            if (lane == 0 && c < live) out[(u64)(first + c) * m.rows + r] = m.scale == 1.0f ? v : v * m.scale;
        }
    }
}

// A norm a head, then rotation, in place. grid: (rows, heads), one warp. rope: 0 none, 1 pairs (2i, 2i + 1), 2 pairs (i, i + 64).
extern "C" __global__ void strict_qk(const Row* rows, float* x, const float* weight, float eps, int rope, const float2* angles) {
    wait_previous();
    float* head = x + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * HD;
    const float2* angle = angles + (u64)rows[blockIdx.x].pos * (HD / 2);
    const int lane = threadIdx.x;
    float f = rms_factor(head, HD, eps), v[4], other[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = head[lane + 32 * k] * f * weight[lane + 32 * k];
#pragma unroll
    for (int k = 0; k < 4; ++k) other[k] = rope == 1 ? __shfl_xor_sync(0xffffffffu, v[k], 1) : v[k ^ 2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        int e = lane + 32 * k;
        bool second = rope == 1 ? e & 1 : k >= 2;
        float2 turn = angle[rope == 1 ? e / 2 : e & 63];
        float a = second ? other[k] : v[k], b = second ? v[k] : other[k];
        float y = second ? __fmaf_rn(a, turn.y, b * turn.x) : __fmaf_rn(a, turn.x, -(b * turn.y));
        head[e] = rope ? y : v[k];
    }
}

__device__ __forceinline__ u32 row_of(const Cache& c, u32 pos) { return c.window ? pos % c.capacity : pos; }
// Keys and values to the cache, rounded to nearest even. grid: (rows), 256 threads.
extern "C" __global__ void strict_store(const Row* rows, const float* k, const float* v, const Cache cache) {
    wait_previous();
    const Row row = rows[blockIdx.x];
    u64 to = (u64)row_of(cache, row.pos) * cache.width, from = (u64)blockIdx.x * cache.width;
    for (u32 i = threadIdx.x; i < cache.width; i += 256) {
        ((u16**)cache.k)[row.slot][to + i] = round_half(k[from + i]);
        ((u16**)cache.v)[row.slot][to + i] = round_half(v[from + i]);
    }
}

// One head of one row. grid: (heads, rows), 128 threads. weights: `span` floats for each head and row of the launch.
extern "C" __global__ void __launch_bounds__(128) strict_attend(const Row* rows, const float* q, const Cache cache, int block, float scale, const float* gate,
                                                                float* weights, u32 span, float* out) {
    wait_previous();
    __shared__ float tops[4], total;
    const Row row = rows[blockIdx.y];
    const int heads = gridDim.x, head = blockIdx.x, kv = head / (heads / (int)cache.kv_heads), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 first = cache.window && row.pos + 1 > cache.window ? row.pos + 1 - cache.window : 0, keys = (block ? row.end : row.pos) + 1 - first;
    const u64 at = ((u64)blockIdx.y * heads + head) * HD;
    const u16 *k = ((u16**)cache.k)[row.slot] + kv * HD, *v = ((u16**)cache.v)[row.slot] + kv * HD;
    float* w = weights + ((u64)blockIdx.y * heads + head) * span;
    float mine[4], top = __uint_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[i] = q[at + lane + 32 * i];
    for (u32 j = warp; j < keys; j += 4) {
        const u16* key = k + (u64)row_of(cache, first + j) * cache.width;
        float acc = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) acc = __fmaf_rn(mine[i], half_to_float(key[lane + 32 * i]), acc);
        acc = fold(acc) * scale;
        if (lane == 0) w[j] = acc;
        top = fmaxf(top, acc);
    }
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    for (u32 j = threadIdx.x; j < keys; j += 128) w[j] = strict_exp(w[j] - top);
    __syncthreads();
    if (warp == 0) {
        float sum = 0.0f;
        for (u32 j = lane; j < keys; j += 32) sum += w[j];
        sum = fold(sum);
        if (lane == 0) total = sum;
    }
    // A thread has one element, and all 32 lanes of its sum.
    float lanes[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) lanes[i] = 0.0f;
    for (u32 j = 0; j < keys; j += 32) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (j + i < keys) lanes[i] = __fmaf_rn(w[j + i], half_to_float(v[(u64)row_of(cache, first + j + i) * cache.width + threadIdx.x]), lanes[i]);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i < d) lanes[i] += lanes[i + d];
    __syncthreads();
    float y = lanes[0] / total;
    if (gate) y *= 1.0f / (1.0f + strict_exp(-gate[at + threadIdx.x]));
    out[at + threadIdx.x] = y;
}

// p = rms(p) * post (post null: as it is); x += p; h = rms(x) * next. grid: (rows), one warp.
extern "C" __global__ void strict_tail(float* p, const float* post, float post_eps, float* x, const float* next, float eps, u32 n, float* h) {
    wait_previous();
    u64 at = (u64)blockIdx.x * n;
    float f = post ? rms_factor(p + at, n, post_eps) : 1.0f;
    for (u32 i = threadIdx.x; i < n; i += 32) {
        float v = post ? p[at + i] * f * post[i] : p[at + i];
        p[at + i] = v;
        x[at + i] += v;
    }
    f = rms_factor(x + at, n, eps);
    for (u32 i = threadIdx.x; i < n; i += 32) h[at + i] = x[at + i] * f * next[i];
}

// Rows of x to their places among the features. grid: (rows), 256 threads.
extern "C" __global__ void strict_capture(const Row* rows, const float* x, u32 n, float* features, u32 stride) {
    wait_previous();
    for (u32 i = threadIdx.x; i < n; i += 256) features[(u64)rows[blockIdx.x].feature * stride + i] = x[(u64)blockIdx.x * n + i];
}

// Rows of features for the drafter's context. grid: (rows), 256 threads.
extern "C" __global__ void strict_pick(const Row* rows, const float* features, u32 n, float* out) {
    wait_previous();
    for (u32 i = threadIdx.x; i < n; i += 256) out[(u64)blockIdx.x * n + i] = features[(u64)rows[blockIdx.x].feature * n + i];
}

// Rows that ask for logits, in their order. grid: (batch), 256 threads.
extern "C" __global__ void strict_gather(const Row* rows, const float* h, u32 n, float* out) {
    wait_previous();
    int to = rows[blockIdx.x].logit;
    if (to < 0) return;
    for (u32 i = threadIdx.x; i < n; i += 256) out[(u64)to * n + i] = h[(u64)blockIdx.x * n + i];
}

// f = silu(g) * u. grid: ceil(n / 256), 256 threads.
extern "C" __global__ void strict_silu_mul(const float* g, const float* u, u64 n, float* f) {
    wait_previous();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < n) f[i] = g[i] / (1.0f + strict_exp(-g[i])) * u[i];
}

// l = cap * tanh(l * scale / cap), or l * scale where cap is 0. grid: ceil(n / 256), 256 threads.
extern "C" __global__ void strict_scale_cap(float* l, u64 n, float scale, float cap) {
    wait_previous();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < n) l[i] = cap > 0.0f ? cap * strict_tanh(l[i] * scale / cap) : l[i] * scale;
}
