// Embedding, RMS norms and the tails between blocks; each also quantises what it hands to the next product.
// Layout: one block of 1024 threads a row; a row stays in registers (at most 8 values a thread).
// Bytes: a few rows of activations. Operations: two sums of squares.
// Latency binds: the kernels after it fetch their weights meanwhile.
#define PER_THREAD 8

// Writes `h` f32, f16 and int8. Threads hold element i * 1024 + threadIdx.x in v[i].
__device__ __forceinline__ void emit(const float* v, u32 n, u64 at, const Activation& h, int halves) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        if (i * 1024 + (threadIdx.x & ~31u) < n) {
            h.f[at + e] = v[i];
            if (halves) h.h[at + e] = float_to_half(v[i]);
            else quantize32(v[i], at + (e - lane), lane, h);
        }
    }
}

__device__ __forceinline__ float rms(const float* v, u32 n, float eps, float* shared) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) sum += v[i] * v[i];
    return rsqrtf(block_sum(sum, shared) / (float)n + eps);
}

// x = table[token] (normed without weight where eps >= 0).
extern "C" __global__ void __launch_bounds__(1024) embed(const Row* rows, const u8* table, int type, u32 n, float eps, float* x) {
    __shared__ float shared[33];
    allow_next();
    wait_previous();
    const u8* row = table + (u64)rows[blockIdx.x].token * row_bytes(type, n);
    float v[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        v[i] = e < n ? weight(type, row, n, e) : 0.0f;
    }
    float f = eps >= 0.0f ? rms(v, n, eps, shared) : 1.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        if (e < n) x[(u64)blockIdx.x * n + e] = v[i] * f;
    }
}

// h = rms(from) * weight.
extern "C" __global__ void __launch_bounds__(1024) rms_norm(const float* from, const float* weight, u32 n, float eps, const Activation h, int halves) {
    __shared__ float shared[33];
    allow_next();
    wait_previous();
    u64 at = (u64)blockIdx.x * n;
    float v[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        v[i] = e < n ? from[at + e] : 0.0f;
    }
    float f = rms(v, n, eps, shared);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        if (e < n) v[i] = v[i] * f * weight[e];
    }
    emit(v, n, at, h, halves);
}

// x += rms(p) * post (post null: x += p); h = rms(x) * next; features get x where a capture stands.
extern "C" __global__ void __launch_bounds__(1024) tail(const float* p, const float* post, float post_eps, float* x, const float* next, float eps, u32 n,
                                                         const Activation h, int halves, const Row* rows, float* features, u32 feature_stride) {
    __shared__ float shared[33];
    allow_next();
    u64 at = (u64)blockIdx.x * n;
    // Weights are there before the kernels ahead are done.
    float v[PER_THREAD], w[PER_THREAD], after[PER_THREAD], before[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        before[i] = post && e < n ? post[e] : 0.0f;
        after[i] = e < n ? next[e] : 0.0f;
    }
    wait_previous();
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        v[i] = e < n ? p[at + e] : 0.0f;
        w[i] = e < n ? x[at + e] : 0.0f;
    }
    float f = post ? rms(v, n, post_eps, shared) : 1.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        if (e < n) {
            v[i] = post ? v[i] * f * before[i] + w[i] : v[i] + w[i];
            x[at + e] = v[i];
            if (features) features[(u64)rows[blockIdx.x].feature * feature_stride + e] = v[i];
        } else {
            v[i] = 0.0f;
        }
    }
    f = rms(v, n, eps, shared);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        u32 e = i * 1024 + threadIdx.x;
        v[i] = v[i] * f * after[i];
    }
    emit(v, n, at, h, halves);
}

// Picks feature rows and quantises them for the drafter's first product. grid: (rows), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) pick_features(const Row* rows, const float* features, u32 n, const Activation out, int halves) {
    allow_next();
    wait_previous();
    u64 from = (u64)rows[blockIdx.x].feature * n, at = (u64)blockIdx.x * n;
    int lane = threadIdx.x & 31;
    for (u32 base = threadIdx.x & ~31u; base < n; base += 1024) {
        float v = features[from + base + lane];
        out.f[at + base + lane] = v;
        if (halves) out.h[at + base + lane] = float_to_half(v);
        else quantize32(v, at + base, lane, out);
    }
}

// f = silu(g) * u for products on many rows. grid: ceil(n / 1024) blocks of 256, four values each.
extern "C" __global__ void silu_mul(const float* g, const float* u, float* f, u16* h, u64 n) {
    allow_next();
    wait_previous();
    u64 i = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= n) return;
    float4 a = *(const float4*)(g + i), b = *(const float4*)(u + i);
    float4 v = make_float4(a.x / (1.0f + __expf(-a.x)) * b.x, a.y / (1.0f + __expf(-a.y)) * b.y, a.z / (1.0f + __expf(-a.z)) * b.z, a.w / (1.0f + __expf(-a.w)) * b.w);
    *(float4*)(f + i) = v;
    *(uint2*)(h + i) = make_uint2(floats_to_half2(v.x, v.y), floats_to_half2(v.z, v.w));
}

// f = silu(g) * u for a few rows, quantised for the product that follows. grid: ceil(n / 1024) blocks of 1024; n is a multiple of 32.
extern "C" __global__ void __launch_bounds__(1024) silu_quantize(const float* g, const float* u, u64 n, const Activation out) {
    allow_next();
    wait_previous();
    u64 base = (u64)blockIdx.x * 1024 + (threadIdx.x & ~31u);
    if (base >= n) return;
    int lane = threadIdx.x & 31;
    float a = g[base + lane], v = a / (1.0f + __expf(-a)) * u[base + lane];
    out.f[base + lane] = v;
    quantize32(v, base, lane, out);
}

// logits = cap * tanh(l * scale / cap), in place.
extern "C" __global__ void scale_cap(float* l, u64 n, float scale, float cap) {
    allow_next();
    wait_previous();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < n) l[i] = cap > 0.0f ? cap * tanhf(l[i] * scale / cap) : l[i] * scale;
}

// Rows that ask for logits, in the order of their logits. grid: (batch), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) gather(const Row* rows, const float* h, u32 n, const Activation out, int halves) {
    allow_next();
    wait_previous();
    int to = rows[blockIdx.x].logit, lane = threadIdx.x & 31;
    if (to < 0) return;
    u64 from = (u64)blockIdx.x * n, at = (u64)to * n;
    for (u32 base = threadIdx.x & ~31u; base < n; base += 1024) {
        float v = h[from + base + lane];
        out.f[at + base + lane] = v;
        if (halves) out.h[at + base + lane] = float_to_half(v);
        else quantize32(v, at + base, lane, out);
    }
}

// Index of the largest logit, the lowest among equals. grid: (rows), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) argmax(const float* logits, u32 n, u32* best) {
    allow_next();
    wait_previous();
    __shared__ float values[32];
    __shared__ u32 at[32];
    const float* row = logits + (u64)blockIdx.x * n;
    float v = -3.0e38f;
    u32 i = 0xffffffffu;
    for (u32 e = threadIdx.x; e < n; e += 1024)
        if (row[e] > v || i == 0xffffffffu) { v = row[e]; i = e; }
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
    if (threadIdx.x == 0) best[blockIdx.x] = i;
}
