// Norms, tails and the small steps between products.
// Layout: a block a row, its elements in shared memory, where one warp sums squares in the contract's order.
// Bytes: a row once in and once out. The order of the sum binds: 208 dependent multiply-adds for 6,656 elements.

// Elements of a row that a thread of 1024 has at most.
#define PER_THREAD 8
// A row to registers, zeros behind its end.
__device__ __forceinline__ void read_row(const float* from, u32 n, float* v) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; ++i) v[i] = i * 1024 + threadIdx.x < n ? from[i * 1024 + threadIdx.x] : 0.0f;
}
__device__ __forceinline__ void write_row(float* to, u32 n, const float* v) {
#pragma unroll
    for (u32 i = 0; i < PER_THREAD; ++i)
        if (i * 1024 + threadIdx.x < n) to[i * 1024 + threadIdx.x] = v[i];
}
__device__ __forceinline__ float row_factor(const float* v, u32 n, float eps, float* factor) {
    float* row = (float*)shared_bytes;
    write_row(row, (n + SUM_STEP - 1) / SUM_STEP * SUM_STEP, v);
    return block_factor(row, n, eps, factor);
}

// out = rms(from) * weight. grid: (rows), 1024 threads, the row in shared memory.
extern "C" __global__ void __launch_bounds__(1024) strict_norm(const float* from, const float* weight, u32 n, float eps, float* out) {
    __shared__ float factor;
    float v[PER_THREAD], w[PER_THREAD];
    const u64 at = (u64)blockIdx.x * n;
    allow_next();
    read_row(weight, n, w);
    wait_previous();
    read_row(from + at, n, v);
    const float f = row_factor(v, n, eps, &factor);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) v[i] = v[i] * f * w[i];
    write_row(out + at, n, v);
}

// p = rms(p) * post (post null: as it is); x += p; h = rms(x) * next. grid: (rows), 1024 threads, the row in shared memory.
extern "C" __global__ void __launch_bounds__(1024) strict_tail(float* p, const float* post, float post_eps, float* x, const float* next, float eps, u32 n, float* h) {
    __shared__ float factor;
    float v[PER_THREAD], w[PER_THREAD], before[PER_THREAD], after[PER_THREAD];
    const u64 at = (u64)blockIdx.x * n;
    allow_next();
    // Weights are there before the kernels ahead are done.
    if (post) read_row(post, n, before);
    read_row(next, n, after);
    wait_previous();
    read_row(p + at, n, v);
    read_row(x + at, n, w);
    if (post) {
        const float f = row_factor(v, n, post_eps, &factor);
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) v[i] = v[i] * f * before[i];
        write_row(p + at, n, v);
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) w[i] += v[i];
    write_row(x + at, n, w);
    const float f = row_factor(w, n, eps, &factor);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) w[i] = w[i] * f * after[i];
    write_row(h + at, n, w);
}

// Rows of x to their places among the features. grid: (rows), 256 threads.
extern "C" __global__ void strict_capture(const Row* rows, const float* x, u32 n, float* features, u32 stride) {
    allow_next();
    wait_previous();
    for (u32 i = threadIdx.x; i < n; i += 256) features[(u64)rows[blockIdx.x].feature * stride + i] = x[(u64)blockIdx.x * n + i];
}

// Rows of features for the drafter's context. grid: (rows), 256 threads.
extern "C" __global__ void strict_pick(const Row* rows, const float* features, u32 n, float* out) {
    allow_next();
    wait_previous();
    for (u32 i = threadIdx.x; i < n; i += 256) out[(u64)blockIdx.x * n + i] = features[(u64)rows[blockIdx.x].feature * n + i];
}

// Rows that ask for logits, in their order. grid: (batch), 256 threads.
extern "C" __global__ void strict_gather(const Row* rows, const float* h, u32 n, float* out) {
    allow_next();
    wait_previous();
    int to = rows[blockIdx.x].logit;
    if (to < 0) return;
    for (u32 i = threadIdx.x; i < n; i += 256) out[(u64)to * n + i] = h[(u64)blockIdx.x * n + i];
}

// f = silu(g) * u. grid: ceil(n / 256), 256 threads.
extern "C" __global__ void strict_silu_mul(const float* g, const float* u, u64 n, float* f) {
    allow_next();
    wait_previous();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < n) f[i] = g[i] / (1.0f + strict_exp(-g[i])) * u[i];
}

// l = cap * tanh(l * scale / cap), or l * scale where cap is 0. grid: ceil(n / 256), 256 threads.
extern "C" __global__ void strict_scale_cap(float* l, u64 n, float scale, float cap) {
    allow_next();
    wait_previous();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i < n) l[i] = cap > 0.0f ? cap * strict_tanh(l[i] * scale / cap) : l[i] * scale;
}
