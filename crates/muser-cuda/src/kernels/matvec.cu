// Matrix times 1 to 8 activation rows: out[c][r] = scale * dot(W[r], x[c]).
// Layout: one warp takes two rows of W at a time; a lane takes 16-byte chunks of quants and multiplies them as int8 (dp4a).
// Bytes: the weights, once for all columns. Operations: 2 a weight and column.
// Memory binds up to about 4 columns; beyond, the integer units.
// Mirrors of the structs in launch.rs.
struct Segment {
    const u8* w;
    float* out;
    int rows, type;
    float scale;
    int pad;
};
struct Matvec {
    Segment seg[4];
    int segments, cols, n, first;   // n: live columns, at most NC; first: logit of column 0
    u32 x_stride, out_stride[4];    // elements from one activation row to the next
    float mul, cap;                 // v = v * mul, then cap * tanh(v / cap); cap 0: none
    int batch;
    const Row* gather;              // head: activation rows are those that ask for logits
};

__device__ __forceinline__ int dot16(uint4 a, uint4 b, int acc) {
    acc = __dp4a((int)a.x, (int)b.x, acc);
    acc = __dp4a((int)a.y, (int)b.y, acc);
    acc = __dp4a((int)a.z, (int)b.z, acc);
    return __dp4a((int)a.w, (int)b.w, acc);
}
__device__ __forceinline__ uint4 low4(uint4 q) {
    return make_uint4(q.x & 0x0f0f0f0f, q.y & 0x0f0f0f0f, q.z & 0x0f0f0f0f, q.w & 0x0f0f0f0f);
}
__device__ __forceinline__ uint4 high4(uint4 q) {
    return make_uint4((q.x >> 4) & 0x0f0f0f0f, (q.y >> 4) & 0x0f0f0f0f, (q.z >> 4) & 0x0f0f0f0f, (q.w >> 4) & 0x0f0f0f0f);
}
// Weights are read once: they pass the first-level cache by.
__device__ __forceinline__ uint4 stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// One chunk of one row, as loaded.
struct Chunk {
    uint4 q, head, extra;
};

template <int T>
__device__ __forceinline__ Chunk load_chunk(const u8* row, int cols, int c) {
    Chunk k;
    if (T == Q4_K) {
        const u8* b = row + (u64)(c >> 3) * 144;
        k.q = stream(b + 16 + (c & 7) * 16);
        k.head = *(const uint4*)b;
    } else if (T == Q5_K) {
        const u8* b = row + (u64)(c >> 3) * 176;
        k.q = stream(b + 48 + (c & 7) * 16);
        k.head = *(const uint4*)b;
        k.extra = *(const uint4*)(b + 16 + (c & 1) * 16);
    } else if (T == Q6_K) {
        u32 blocks = cols / 256, b = c >> 3, j = c & 7;
        k.q = stream(row + b * 128 + j * 16);
        k.extra = *(const uint4*)(row + blocks * 128 + b * 64 + (j >> 2) * 32 + (j & 1) * 16);
        const i8* s = (const i8*)(row + blocks * 192 + b * 16) + (j >> 2) * 8 + (j & 1) + ((j >> 1) & 1) * 2;
        k.head = make_uint4((u32)(int)s[0], (u32)(int)s[4], ((const u16*)(row + blocks * 208))[b], 0);
    } else if (T == Q8_0) {
        k.q = stream(row + (u64)c * 16);
        k.head = make_uint4(((const u16*)(row + cols))[c >> 1], 0, 0, 0);
    } else if (T == Q4_0) {
        k.q = stream(row + (u64)c * 16);
        k.head = make_uint4(((const u16*)(row + cols / 2))[c], 0, 0, 0);
    } else {
        k.q = stream(row + (u64)c * 16);
    }
    return k;
}

template <int T>
__device__ __forceinline__ int chunks(int cols) {
    return T == F32 ? cols / 4 : T == F16 || T == BF16 ? cols / 8 : T == Q8_0 ? cols / 16 : cols / 32;
}

// Adds a chunk's part of the dot product with one activation row.
template <int T>
__device__ __forceinline__ float chunk_dot(const Chunk& k, int c, const i8* q, const float* d, const float* s, const float* f) {
    if (T == Q4_K || T == Q5_K) {
        int j = c & 7, e = (c >> 3) * 256 + (j >> 1) * 64 + (j & 1) * 16, g = (j >> 1) * 2;
        // Scales and minima of both groups at once, as pairs of bytes.
        int shift = (j & 2) * 8;
        u32 w0 = k.head.y >> shift, w1 = k.head.z >> shift, w2 = k.head.w >> shift;
        u32 sc = j < 4 ? w0 & 0x3f3f : (w2 & 0x0f0f) | ((w0 & 0xc0c0) >> 2);
        u32 mn = j < 4 ? w1 & 0x3f3f : ((w2 >> 4) & 0x0f0f) | ((w1 & 0xc0c0) >> 2);
        int s0 = sc & 255, s1 = (sc >> 8) & 255;
        float m0 = (float)(mn & 255), m1 = (float)((mn >> 8) & 255);
        uint4 lo = low4(k.q), hi = high4(k.q);
        if (T == Q5_K) {
            const u32 one = 0x01010101;
            lo.x |= ((k.extra.x >> g) & one) << 4; lo.y |= ((k.extra.y >> g) & one) << 4;
            lo.z |= ((k.extra.z >> g) & one) << 4; lo.w |= ((k.extra.w >> g) & one) << 4;
            hi.x |= ((k.extra.x >> (g + 1)) & one) << 4; hi.y |= ((k.extra.y >> (g + 1)) & one) << 4;
            hi.z |= ((k.extra.z >> (g + 1)) & one) << 4; hi.w |= ((k.extra.w >> (g + 1)) & one) << 4;
        }
        int a = dot16(lo, *(const uint4*)(q + e), 0), b = dot16(hi, *(const uint4*)(q + e + 32), 0);
        float dw = half_to_float((u16)k.head.x), mw = half_to_float((u16)(k.head.x >> 16));
        float2 dx = *(const float2*)(d + (e >> 5));
        float v = (float)(s0 * a) * dx.x + (float)(s1 * b) * dx.y;
        float m = m0 * s[e >> 4] + m1 * s[(e >> 4) + 2];
        return dw * v - mw * m;
    }
    if (T == Q6_K) {
        // Chunk j holds the low bits of elements l + 32 * (j / 2 % 2) and 64 further; l = 16 * (j % 2) ...
        int j = c & 7, part = (j >> 1) & 1, e = (c >> 3) * 256 + (j >> 2) * 128 + part * 32 + (j & 1) * 16;
        uint4 lo = low4(k.q), hi = high4(k.q);
        const u32 two = 0x03030303;
        int p = 2 * part;
        lo.x |= ((k.extra.x >> p) & two) << 4; lo.y |= ((k.extra.y >> p) & two) << 4;
        lo.z |= ((k.extra.z >> p) & two) << 4; lo.w |= ((k.extra.w >> p) & two) << 4;
        hi.x |= ((k.extra.x >> (p + 4)) & two) << 4; hi.y |= ((k.extra.y >> (p + 4)) & two) << 4;
        hi.z |= ((k.extra.z >> (p + 4)) & two) << 4; hi.w |= ((k.extra.w >> (p + 4)) & two) << 4;
        int a = dot16(lo, *(const uint4*)(q + e), 0), b = dot16(hi, *(const uint4*)(q + e + 64), 0);
        // Quants stand 32 too high: that part is 32 times the sum of the activations.
        float va = (float)a * d[e >> 5] - 32.0f * s[e >> 4], vb = (float)b * d[(e >> 5) + 2] - 32.0f * s[(e >> 4) + 4];
        return half_to_float((u16)k.head.z) * ((float)(int)k.head.x * va + (float)(int)k.head.y * vb);
    }
    if (T == Q8_0) {
        int e = c * 16;
        return half_to_float((u16)k.head.x) * d[e >> 5] * (float)dot16(k.q, *(const uint4*)(q + e), 0);
    }
    if (T == Q4_0) {
        int e = c * 32;
        int a = dot16(low4(k.q), *(const uint4*)(q + e), 0) + dot16(high4(k.q), *(const uint4*)(q + e + 16), 0);
        return half_to_float((u16)k.head.x) * ((float)a * d[c] - 8.0f * (s[2 * c] + s[2 * c + 1]));
    }
    if (T == F32) {
        float4 x = *(const float4*)(f + c * 4);
        return __uint_as_float(k.q.x) * x.x + __uint_as_float(k.q.y) * x.y + __uint_as_float(k.q.z) * x.z + __uint_as_float(k.q.w) * x.w;
    }
    float v = 0.0f;
    const u32* w = (const u32*)&k.q;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 x = *(const float2*)(f + c * 8 + 2 * i);
        u16 lo = (u16)w[i], hi = (u16)(w[i] >> 16);
        v += T == F16 ? half_to_float(lo) * x.x + half_to_float(hi) * x.y : bf16_to_float(lo) * x.x + bf16_to_float(hi) * x.y;
    }
    return v;
}

// Two rows of W against NC activation rows; all lanes get the sums.
template <int T, int NC>
__device__ __forceinline__ void two_rows(const u8* w0, const u8* w1, const Matvec& a, const Activation& x, const int* columns, float out[2][NC]) {
    const int lane = threadIdx.x & 31, total = chunks<T>(a.cols);
    float acc[2][NC];
#pragma unroll
    for (int c = 0; c < NC; ++c) acc[0][c] = acc[1][c] = 0.0f;
    // The next chunks are loaded before the current ones are used.
    int i = lane;
    Chunk k0, k1;
    if (i < total) {
        k0 = load_chunk<T>(w0, a.cols, i);
        k1 = load_chunk<T>(w1, a.cols, i);
    }
#pragma unroll 1
    while (i < total) {
        int next = i + 32;
        Chunk n0, n1;
        if (next < total) {
            n0 = load_chunk<T>(w0, a.cols, next);
            n1 = load_chunk<T>(w1, a.cols, next);
        }
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            u64 at = (u64)columns[c] * a.x_stride;
            acc[0][c] += chunk_dot<T>(k0, i, x.q + at, x.d + (at >> 5), x.s + (at >> 4), x.f + at);
            acc[1][c] += chunk_dot<T>(k1, i, x.q + at, x.d + (at >> 5), x.s + (at >> 4), x.f + at);
        }
        k0 = n0;
        k1 = n1;
        i = next;
    }
#pragma unroll
    for (int c = 0; c < NC; ++c) {
        out[0][c] = warp_sum(acc[0][c]);
        out[1][c] = warp_sum(acc[1][c]);
    }
}

// Fetches the first part of two rows into the second-level cache while the kernels before are still at work.
__device__ __forceinline__ void prefetch_rows(const u8* w0, const u8* w1, u64 bytes) {
    u64 most = bytes < 16384 ? bytes : 16384;
    for (u64 at = (threadIdx.x & 31) * 128; at < most; at += 4096) {
        prefetch_l2(w0 + at);
        prefetch_l2(w1 + at);
    }
}

// The activation row of each column: the batch's row, or the row that asks for logit `c`.
template <int NC>
__device__ __forceinline__ void columns_of(const Matvec& a, int* columns) {
#pragma unroll
    for (int c = 0; c < NC; ++c) columns[c] = c < a.n ? c : a.n - 1;
    if (a.gather) {
        for (int r = 0; r < a.batch; ++r) {
            int at = a.gather[r].logit;
#pragma unroll
            for (int c = 0; c < NC; ++c)
                if (at == a.first + c) columns[c] = r;
        }
#pragma unroll
        for (int c = 0; c < NC; ++c)
            if (c >= a.n) columns[c] = columns[0];
    }
}

// Longest activation row that a block keeps in shared memory (mirrors SHARED_COLUMNS in program.rs).
#define SHARED_COLUMNS 34816
extern __shared__ uint4 staged[];

// One activation row, copied beside the warps: they read it once for every row of W.
template <int T>
__device__ __forceinline__ Activation stage(const Matvec& a, const Activation& x, int& column) {
    if (T < Q8_0 || a.cols > SHARED_COLUMNS) return x;
    u64 at = (u64)column * a.x_stride;
    int q = a.cols / 16, d = a.cols / 128, s = a.cols / 64;
    const uint4 *from_q = (const uint4*)(x.q + at), *from_d = (const uint4*)(x.d + (at >> 5)), *from_s = (const uint4*)(x.s + (at >> 4));
    for (int i = threadIdx.x; i < q; i += 256) staged[i] = from_q[i];
    for (int i = threadIdx.x; i < d; i += 256) staged[q + i] = from_d[i];
    for (int i = threadIdx.x; i < s; i += 256) staged[q + d + i] = from_s[i];
    __syncthreads();
    Activation y = x;
    y.q = (i8*)staged;
    y.d = (float*)(staged + q);
    y.s = (float*)(staged + q + d);
    column = 0;
    return y;
}

// grid: one block of 8 warps for 16 rows of the concatenated segments.
template <int T, int NC>
__device__ __forceinline__ void matvec(const Matvec& a, const Activation& x) {
    int r = (blockIdx.x * 8 + (threadIdx.x >> 5)) * 2;
    const u8* w = a.seg[0].w;
    float* out = a.seg[0].out;
    float scale = a.seg[0].scale;
    u32 stride = a.out_stride[0];
    int rows = a.seg[0].rows;
#pragma unroll
    for (int s = 1; s < 4; ++s) {
        if (s < a.segments && r >= rows) {
            r -= rows;
            rows = a.seg[s].rows; w = a.seg[s].w; out = a.seg[s].out; scale = a.seg[s].scale; stride = a.out_stride[s];
        }
    }
    bool live = r < rows;
    u64 bytes = row_bytes(T, a.cols);
    const u8* w0 = w + (u64)(live ? r : 0) * bytes;
    if (live) prefetch_rows(w0, w0 + bytes, bytes);
    allow_next();
    wait_previous();
    int columns[NC];
    columns_of<NC>(a, columns);
    const Activation y = NC == 1 ? stage<T>(a, x, columns[0]) : x;
    if (!live) return;
    float sums[2][NC];
    two_rows<T, NC>(w0, w0 + bytes, a, y, columns, sums);
    int lane = threadIdx.x & 31;
    if (lane < 2) {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            float v = (lane ? sums[1][c] : sums[0][c]) * scale * a.mul;
            if (a.cap > 0.0f) v = a.cap * tanhf(v / a.cap);
            if (c < a.n) out[(u64)c * stride + r + lane] = v;
        }
    }
}

// grid: one block of 8 warps for 32 outputs, four a warp; the block quantises its 32 for the product that follows.
template <int T, int NC>
__device__ __forceinline__ void gate_up(const Matvec& a, const Activation& x, const Activation& out) {
    __shared__ float values[NC][32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, base = blockIdx.x * 32;
    u64 bytes = row_bytes(T, a.cols);
    const u8 *gate = a.seg[0].w + (u64)(base + warp * 4) * bytes, *up = a.seg[1].w + (u64)(base + warp * 4) * bytes;
    for (int i = 0; i < 4; ++i) prefetch_rows(gate + i * bytes, up + i * bytes, bytes);
    allow_next();
    wait_previous();
    int columns[NC];
#pragma unroll
    for (int c = 0; c < NC; ++c) columns[c] = c < a.n ? c : a.n - 1;
    const Activation y = NC == 1 ? stage<T>(a, x, columns[0]) : x;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        float v[2][NC];
        two_rows<T, NC>(gate + i * bytes, up + i * bytes, a, y, columns, v);
        if (lane == 0) {
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                float g = v[0][c] * a.seg[0].scale, u = v[1][c] * a.seg[1].scale;
                values[c][warp * 4 + i] = g / (1.0f + __expf(-g)) * u;
            }
        }
    }
    __syncthreads();
    if (warp < a.n && warp < NC) {
        u64 at = (u64)warp * a.out_stride[0] + base;
        float v = values[warp][lane];
        out.f[at + lane] = v;
        quantize32(v, at, lane, out);
    }
}

// 16 weights w * q - m, q from the bytes of a word quadruple, as f16.
__device__ __forceinline__ void widen16(uint4 q, float w, float m, bool is_signed, u16* out) {
    u32 words[8];
    const u32* from = (const u32*)&q;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float v[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            int n = (from[i] >> (8 * b)) & 255;
            v[b] = w * (float)(is_signed ? (int)(i8)n : n) - m;
        }
        words[2 * i] = floats_to_half2(v[0], v[1]);
        words[2 * i + 1] = floats_to_half2(v[2], v[3]);
    }
    ((uint4*)out)[0] = make_uint4(words[0], words[1], words[2], words[3]);
    ((uint4*)out)[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

// One chunk of a row, times `scale`, as f16 where its elements stand.
template <int T>
__device__ __forceinline__ void widen_chunk(const Chunk& k, int c, float scale, u16* out) {
    if (T == Q4_K || T == Q5_K) {
        int j = c & 7, e = (c >> 3) * 256 + (j >> 1) * 64 + (j & 1) * 16, g = (j >> 1) * 2, s0, m0, s1, m1;
        k_scale(k.head.y, k.head.z, k.head.w, g, s0, m0);
        k_scale(k.head.y, k.head.z, k.head.w, g + 1, s1, m1);
        uint4 lo = low4(k.q), hi = high4(k.q);
        if (T == Q5_K) {
            u32 *l = (u32*)&lo, *h = (u32*)&hi;
            const u32* x = (const u32*)&k.extra;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                l[i] |= ((x[i] >> g) & 0x01010101) << 4;
                h[i] |= ((x[i] >> (g + 1)) & 0x01010101) << 4;
            }
        }
        float dw = half_to_float((u16)k.head.x) * scale, mw = half_to_float((u16)(k.head.x >> 16)) * scale;
        widen16(lo, dw * (float)s0, mw * (float)m0, false, out + e);
        widen16(hi, dw * (float)s1, mw * (float)m1, false, out + e + 32);
    } else if (T == Q6_K) {
        int j = c & 7, part = (j >> 1) & 1, e = (c >> 3) * 256 + (j >> 2) * 128 + part * 32 + (j & 1) * 16, p = 2 * part;
        uint4 lo = low4(k.q), hi = high4(k.q);
        u32 *l = (u32*)&lo, *h = (u32*)&hi;
        const u32* x = (const u32*)&k.extra;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            l[i] |= ((x[i] >> p) & 0x03030303) << 4;
            h[i] |= ((x[i] >> (p + 4)) & 0x03030303) << 4;
        }
        float d = half_to_float((u16)k.head.z) * scale, a = d * (float)(int)k.head.x, b = d * (float)(int)k.head.y;
        widen16(lo, a, a * 32.0f, false, out + e);
        widen16(hi, b, b * 32.0f, false, out + e + 64);
    } else if (T == Q8_0) {
        widen16(k.q, half_to_float((u16)k.head.x) * scale, 0.0f, true, out + c * 16);
    } else if (T == Q4_0) {
        float d = half_to_float((u16)k.head.x) * scale;
        widen16(low4(k.q), d, d * 8.0f, false, out + c * 32);
        widen16(high4(k.q), d, d * 8.0f, false, out + c * 32 + 16);
    } else if (T == F32) {
        const float* f = (const float*)&k.q;
        *(uint2*)(out + c * 4) = make_uint2(floats_to_half2(f[0] * scale, f[1] * scale), floats_to_half2(f[2] * scale, f[3] * scale));
    } else {
        const u32* w = (const u32*)&k.q;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u16 lo = (u16)w[i], hi = (u16)(w[i] >> 16);
            float a = T == F16 ? half_to_float(lo) : bf16_to_float(lo), b = T == F16 ? half_to_float(hi) : bf16_to_float(hi);
            ((u32*)(out + c * 8))[i] = floats_to_half2(a * scale, b * scale);
        }
    }
}

// Dequantises a matrix to f16 for a product on many rows. grid: (ceil(chunks / 256), rows), a chunk a thread.
extern "C" __global__ void __launch_bounds__(256) to_half(const u8* w, u32 cols, float scale, u16* out) {
    allow_next();
    wait_previous();
    int c = blockIdx.x * 256 + threadIdx.x;
    if (c >= chunks<TYPE>(cols)) return;
    const u8* row = w + blockIdx.y * row_bytes(TYPE, cols);
    widen_chunk<TYPE>(load_chunk<TYPE>(row, cols, c), c, scale, out + (u64)blockIdx.y * cols);
}

// TYPE (a layout) and COLUMNS (1, 2, 4 or 8) are defined by the caller: each pair is a program of its own, made only for the
// layouts of the model.
// As many blocks a multiprocessor as registers allow without spilling.
#define BLOCKS (COLUMNS == 1 ? (TYPE == Q5_K || TYPE == Q6_K ? 3 : 4) : COLUMNS <= 4 ? 2 : 1)
extern "C" __global__ void __launch_bounds__(256, BLOCKS) matvec_rows(const Matvec a, const Activation x) { matvec<TYPE, COLUMNS>(a, x); }
extern "C" __global__ void __launch_bounds__(256, BLOCKS) gate_up_rows(const Matvec a, const Activation x, const Activation out) {
    gate_up<TYPE, COLUMNS>(a, x, out);
}
