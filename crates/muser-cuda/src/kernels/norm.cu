// Embedding, RMS norms and the tails between blocks; each leaves what the next product takes (Activation in common.cuh).
// Layout: one block of 1024 threads a row; a row stays in registers (at most 8 values a thread).
// Bytes: a few rows of activations. Operations: two sums of squares.
// Latency binds: the kernels after it fetch their weights meanwhile.
#define PER_THREAD 8

// Adds the planes after the first.
__device__ __forceinline__ void add_planes(float* v, const Planes& p, u64 at, u32 n) {
#pragma unroll 2
    for (int k = 1; k < p.count; ++k) {
        const float* more = p.p + k * p.stride + at;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            u32 e = i * 1024 + threadIdx.x;
            if (e < n) v[i] += more[e];
        }
    }
}

__device__ __forceinline__ float rms(const float* v, u32 n, float eps, float* shared) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) sum += v[i] * v[i];
    return rsqrtf(block_sum(sum, shared) / (float)n + eps);
}

// x = table[token] (normed without weight where eps >= 0). A pass begins here: what its blocks count in later launches is cleared.
extern "C" __global__ void __launch_bounds__(1024) embed(const Row* rows, const u8* table, int type, float scale, u32 n, float eps, float* x, u32* counters, u32 count) {
    __shared__ float shared[33];
    allow_next();
    wait_previous();
    if (blockIdx.x == 0)
        for (u32 i = threadIdx.x; i < count; i += 1024) counters[i] = 0;
    u32 token = rows[blockIdx.x].token;
    float v[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        v[i] = e < n ? weight(type, table, n, token, e) * scale : 0.0f;
    }
    float f = eps >= 0.0f ? rms(v, n, eps, shared) : 1.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        if (e < n) x[(u64)blockIdx.x * n + e] = v[i] * f;
    }
}

// h = rms(from) * weight.
extern "C" __global__ void __launch_bounds__(1024) rms_norm(const Planes from, const float* weight, u32 n, float eps, const Activation h) {
    __shared__ float shared[33];
    allow_next();
    wait_previous();
    u64 at = (u64)blockIdx.x * n;
    float v[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        v[i] = e < n ? from.p[at + e] : 0.0f;
    }
    add_planes(v, from, at, n);
    float f = rms(v, n, eps, shared);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        put1(h, blockIdx.x, e, n, e < n ? v[i] * f * weight[e] : 0.0f);
    }
}

__device__ __forceinline__ float4 fours_at(const float* p, u32 e, u32 n) { return e < n ? *(const float4*)(p + e) : make_float4(0, 0, 0, 0); }
template <int FOURS>
__device__ __forceinline__ float rms_fours(const float4* v, u32 n, float eps, float* shared) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    return rsqrtf(block_sum(sum, shared) / (float)n + eps);
}

// x += rms(p) * post (post null: x += p); h = rms(x) * next; features get x where a capture stands. grid: (rows), a thread for each eight
// values, four at once. The squares of x are those of p * post and x before and their products, so one sum of a block tells both norms.
extern "C" __global__ void __launch_bounds__(1024) tail(const Planes p, const float* post, float post_eps, float* x, const float* next, float eps, u32 n,
                                                         const Activation h, const Row* rows, float* features, u32 feature_stride) {
    __shared__ float4 shared[32];
    allow_next();
    const u64 at = (u64)blockIdx.x * n;
    // Weights are there before the kernels ahead are done.
    float4 v[2], w[2], before[2], after[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 e = (i * blockDim.x + threadIdx.x) * 4;
        before[i] = post ? fours_at(post, e, n) : make_float4(1, 1, 1, 1);
        after[i] = fours_at(next, e, n);
    }
    wait_previous();
    // Four planes are on their way at once.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 e = (i * blockDim.x + threadIdx.x) * 4;
        v[i] = fours_at(p.p + at, e, n);
        w[i] = fours_at(x + at, e, n);
    }
#pragma unroll 1
    for (int k = 1; k < p.count; k += 3) {
        float4 more[3][2];
#pragma unroll
        for (int j = 0; j < 3; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) more[j][i] = fours_at(p.p + at + (k + j) * p.stride, (i * blockDim.x + threadIdx.x) * 4, k + j < p.count ? n : 0);
#pragma unroll
        for (int j = 0; j < 3; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) v[i] = add4(v[i], more[j][i]);
    }
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum.x += dot4(v[i], v[i]);
        v[i] = mul4(v[i], before[i]);
        sum.y += dot4(v[i], v[i]);
        sum.z += dot4(v[i], w[i]);
        sum.w += dot4(w[i], w[i]);
    }
    const u32 lane = threadIdx.x & 31;
    sum = make_float4(warp_sum(sum.x), warp_sum(sum.y), warp_sum(sum.z), warp_sum(sum.w));
    if (lane == 0) shared[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = lane < blockDim.x >> 5 ? shared[lane] : make_float4(0, 0, 0, 0);
    sum = make_float4(warp_sum(sum.x), warp_sum(sum.y), warp_sum(sum.z), warp_sum(sum.w));
    const float f = post ? rsqrtf(sum.x / (float)n + post_eps) : 1.0f;
    const float g = rsqrtf(fmaxf(f * f * sum.y + 2.0f * f * sum.z + sum.w, 0.0f) / (float)n + eps);
    float* kept = features ? features + (u64)rows[blockIdx.x].feature * feature_stride : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 e = (i * blockDim.x + threadIdx.x) * 4;
        v[i] = add4(scale4(v[i], f), w[i]);
        put4(h, blockIdx.x, e, n, mul4(scale4(v[i], g), after[i]));
        if (e >= n) continue;
        *(float4*)(x + at + e) = v[i];
        if (kept) *(float4*)(kept + e) = v[i];
    }
}

// What tail does, for many rows: smaller blocks, so that rows of a multiprocessor wait for memory and for each other in turn.
// grid: (rows), 256 threads, four values at once; at most 8,192 values a row.
#define FOURS 8
extern "C" __global__ void __launch_bounds__(256, 2) tail_rows(const float* p, const float* post, float post_eps, float* x, const float* next, float eps, u32 n, u16* h, const Row* rows,
                                                               float* features, u32 feature_stride) {
    __shared__ float shared[33];
    allow_next();
    wait_previous();
    const u64 at = (u64)blockIdx.x * n;
    float4 v[FOURS], w[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
        u32 e = (i * 256 + threadIdx.x) * 4;
        v[i] = e < n ? *(const float4*)(p + at + e) : make_float4(0, 0, 0, 0);
        w[i] = e < n ? *(const float4*)(x + at + e) : make_float4(0, 0, 0, 0);
    }
    const float f = post ? rms_fours<FOURS>(v, n, post_eps, shared) : 1.0f;
    float* kept = features ? features + (u64)rows[blockIdx.x].feature * feature_stride : 0;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
        u32 e = (i * 256 + threadIdx.x) * 4;
        if (e >= n) continue;
        float4 b = post ? *(const float4*)(post + e) : make_float4(1, 1, 1, 1);
        v[i] = make_float4(v[i].x * f * b.x + w[i].x, v[i].y * f * b.y + w[i].y, v[i].z * f * b.z + w[i].z, v[i].w * f * b.w + w[i].w);
        *(float4*)(x + at + e) = v[i];
        if (kept) *(float4*)(kept + e) = v[i];
    }
    const float g = rms_fours<FOURS>(v, n, eps, shared);
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
        u32 e = (i * 256 + threadIdx.x) * 4;
        if (e >= n) continue;
        const float4 b = *(const float4*)(next + e);
        *(uint2*)(h + at + e) = make_uint2(floats_to_half2(v[i].x * g * b.x, v[i].y * g * b.y), floats_to_half2(v[i].z * g * b.z, v[i].w * g * b.w));
    }
}

// Picks feature rows for the drafter's first product. grid: (rows), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) pick_features(const Row* rows, const float* features, u32 n, const Activation out) {
    allow_next();
    wait_previous();
    const float* from = features + (u64)rows[blockIdx.x].feature * n;
    for (u32 e = threadIdx.x; (e & ~31u) < n; e += 1024) put1(out, blockIdx.x, e, n, e < n ? from[e] : 0.0f);
}

// f = silu(g) * u, rows of n values. grid: (ceil(n / 1024), rows), 256 threads, four values each.
extern "C" __global__ void silu_mul(const Planes g, const Planes u, u32 n, const Activation out) {
    allow_next();
    wait_previous();
    const u32 e = (blockIdx.x * 256 + threadIdx.x) * 4;
    const u64 i = (u64)blockIdx.y * n + e;
    float4 v = make_float4(0, 0, 0, 0);
    if (e < n) {
        // Two planes of both are on their way at once.
        float4 a = *(const float4*)(g.p + i), b = *(const float4*)(u.p + i);
        const float4 zero = make_float4(0, 0, 0, 0), c = g.count > 1 ? *(const float4*)(g.p + i + g.stride) : zero, d = u.count > 1 ? *(const float4*)(u.p + i + u.stride) : zero;
        a = add4(a, c);
        b = add4(b, d);
        for (int k = 2; k < g.count; ++k) a = add4(a, *(const float4*)(g.p + i + k * g.stride));
        for (int k = 2; k < u.count; ++k) b = add4(b, *(const float4*)(u.p + i + k * u.stride));
        v = make_float4(a.x / (1.0f + __expf(-a.x)) * b.x, a.y / (1.0f + __expf(-a.y)) * b.y, a.z / (1.0f + __expf(-a.z)) * b.z, a.w / (1.0f + __expf(-a.w)) * b.w);
    }
    put4(out, blockIdx.y, e, n, v);
}

// The same for many rows of n values. grid: (rows, ceil(n / 2048)), 256 threads, eight values each.
extern "C" __global__ void silu_rows(const Halves g, const Halves u, u32 n, u16* out) {
    allow_next();
    wait_previous();
    u32 i = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (i >= n) return;
    const uint4 a = *(const uint4*)(g.p + blockIdx.x * g.stride + i), b = *(const uint4*)(u.p + blockIdx.x * u.stride + i);
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    u32 to[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float2 s = two_halves(x[k]), t = two_halves(y[k]);
        to[k] = floats_to_half2(s.x / (1.0f + __expf(-s.x)) * t.x, s.y / (1.0f + __expf(-s.y)) * t.y);
    }
    *(uint4*)(out + (u64)blockIdx.x * n + i) = make_uint4(to[0], to[1], to[2], to[3]);
}

// logits = cap * tanh(l * scale / cap).
extern "C" __global__ void scale_cap(const Planes l, u64 n, float scale, float cap, float* logits) {
    allow_next();
    wait_previous();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    float v = sum_planes(l, i) * scale;
    logits[i] = cap > 0.0f ? cap * tanhf(v / cap) : v;
}

// Rows that ask for logits, in the order of their logits. grid: (batch), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) gather(const Row* rows, const Activation from, u32 n, const Activation out) {
    allow_next();
    wait_previous();
    const int to = rows[blockIdx.x].logit;
    if (to < 0) return;
    if (out.t && from.t) {
        // As they stand, so that sums keep their bits.
        for (u32 e = threadIdx.x * 2; e < (n + 255) / 256 * 256; e += 2048) {
            u16* there = tile_row(out, to, e);
            const u16* here = tile_row(from, blockIdx.x, e);
            *(u32*)(there + in_tile(out, e)) = *(const u32*)(here + in_tile(from, e));
            if (e & 31) continue;
            there[in_sums(out, e)] = here[in_sums(from, e)];
            there[in_sums(out, e) + to_lack(out)] = here[in_sums(from, e) + to_lack(from)];
        }
        return;
    }
    // One or two rows of a group are to stand alone, or a few of many rows are a group.
    for (u32 e = threadIdx.x; (e & ~31u) < n; e += 1024) {
        u16 w = 0;
        if (e < n) w = from.t ? tile_row(from, blockIdx.x, e)[in_tile(from, e)] : from.h[(u64)blockIdx.x * n + e];
        put1(out, to, e, n, half_to_float(w));
    }
}

// The largest logit of each part of a row and its index, the lowest among equals. grid: (rows, parts), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) argmax(const float* logits, u32 n, uint2* best) {
    allow_next();
    wait_previous();
    __shared__ float values[32];
    __shared__ u32 at[32];
    const float* row = logits + (u64)blockIdx.x * n;
    const u32 share = (n + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share, end = first + share < n ? first + share : n;
    float v = __uint_as_float(0xff800000u);   // of a part without logits: minus infinity
    u32 i = 0xffffffffu;
    // Eight loads on the way at once; elements of a thread come in rising order.
    for (u32 base = first + threadIdx.x; base < end; base += 8 * 1024) {
        float x[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] = base + k * 1024 < end ? row[base + k * 1024] : -3.0e38f;
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (base + k * 1024 < end && (x[k] > v || i == 0xffffffffu)) { v = x[k]; i = base + k * 1024; }
    }
    for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
            float ov = __shfl_xor_sync(0xffffffffu, v, d);
            u32 oi = __shfl_xor_sync(0xffffffffu, i, d);
            if (ov > v || (ov == v && oi < i)) { v = ov; i = oi; }
        }
        if (step == 1) break;
        if ((threadIdx.x & 31) == 0) { values[threadIdx.x >> 5] = v; at[threadIdx.x >> 5] = i; }
        __syncthreads();
        v = values[threadIdx.x & 31];
        i = at[threadIdx.x & 31];
    }
    if (threadIdx.x == 0) best[blockIdx.x * gridDim.y + blockIdx.y] = make_uint2(__float_as_uint(v), i);
}
