// Passes of few rows: QK-norm, rotation, KV store, attention and its gate, for heads of 128.
// Layout: a block has 8 warps and takes the (up to 16) query heads of one KV head through CHUNK keys at a time. Each warp multiplies
// the heads with 16 of the keys on tensor cores (m16n8k16); what comes out becomes weights in shared memory, with which each warp
// multiplies the values of all CHUNK keys, 16 dimensions of them. Chunks are counted back from a row's last key, so that all keys of
// this batch stand in chunk 0, whose block makes them out of what the products left; other keys are read from the cache, and begin to
// be read before the products are done, for earlier passes left them there.
// Bytes: visible keys and values, once a row. Memory binds at depth, latency before.
#define CHUNK 128
#define Q_ROW 320                  // bytes of a query or new key: two neighbours meet all banks
#ifdef KV_Q8_0
#define V_ROW 144                  // bytes of a row of values or a new key: eight rows meet all banks
#define K_ROW V_ROW                // a key's factors stand behind it
#define VALUES (CHUNK * V_ROW)
#define STAGE (VALUES + CHUNK * 8) // factors of values: of all keys for the first 32 dimensions, then for the next
#define RAW 16777216.0f            // of a raw product of query and key in one of their product: bytes are taken as the smallest halves
#else
#define V_ROW 272                  // bytes of a row of values: four rows apart by two meet all banks
#define K_ROW Q_ROW
#define STAGE (CHUNK * V_ROW)
#define RAW 1.0f
#endif
#define FRESH 32                   // rows of a pass at most
// Shared memory; all of it is shared_few in kv.rs.
#define Q_AT (2 * STAGE)
#define K_AT (Q_AT + 16 * Q_ROW)
#define P_AT (K_AT + FRESH * K_ROW)
#define TOP_AT (P_AT + 8 * 32 * 16)
extern __shared__ uint4 shared_bytes[];

__device__ __forceinline__ float4 fma4(float s, float4 a, float4 b) { return make_float4(s * a.x + b.x, s * a.y + b.y, s * a.z + b.z, s * a.w + b.w); }
__device__ __forceinline__ float2 turn(float x, float y, float c, float s) { return make_float2(x * c - y * s, x * s + y * c); }

// Registers of keys, once these are used.
#ifdef KV_Q8_0
#define SPARE(row, i) keys.w[row][i]
#else
#define SPARE(row, i) keys[row][i]
#endif

// Largest or sum of what the 8 warps left for a head.
__device__ __forceinline__ float of_warps(const float* at, int head, bool sum) {
    const float4 a = ((const float4*)at)[2 * head], b = ((const float4*)at)[2 * head + 1];
    if (sum) return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
    return fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
}

// Keys first..last (exclusive) of a row in chunks, and the blocks among which these are split.
struct Span {
    int first, last, chunks, parts;
};
__device__ __forceinline__ Span span(const Row& row, const Cache& cache, int block, int splits) {
    u32 first, last;
    visible(row, cache, block, first, last);
    const int chunks = (last - first + CHUNK - 1) / CHUNK;
    return Span{(int)first, (int)last, chunks, chunks < splits ? chunks : splits};
}

__device__ __forceinline__ float4 gated_by(float4 x, float inv, bool gated, float4 gate) {
    x = make_float4(x.x * inv, x.y * inv, x.z * inv, x.w * inv);
    if (gated) x = make_float4(x.x / (1.0f + __expf(-gate.x)), x.y / (1.0f + __expf(-gate.y)), x.z / (1.0f + __expf(-gate.z)), x.w / (1.0f + __expf(-gate.w)));
    return x;
}

// grid: (blocks among which a row's keys are split at most, kv_heads, rows), 256 threads. partial: parts by row, KV head and block, of
// rows whose keys are split.
extern "C" __global__ void __launch_bounds__(256, 2) attend_few(const Row* rows, int heads, const Planes q, const float* q_norm, const Planes k, const Planes v, const float* k_norm, float eps, int rope,
                                                                const float2* angles, const Cache cache, int block, float scale, const Planes gate, float* partial, const Activation out) {
    u8* const shared = (u8*)shared_bytes;
    float* const tops = (float*)(shared + TOP_AT);
    const float unit = scale * 1.4426950408889634f * RAW;   // exp(x * scale) = 2^(x * unit)
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, group = heads / cache.kv_heads;
    // Eight lanes make a vector of 128: a query, or a key or value of this batch. Lane `eighth` has elements 32i + 4 * eighth .. + 3.
    const int eighth = lane & 7, vector = warp * 4 + (lane >> 3);
    float4 norm[4], c[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) norm[i] = ((const float4*)(vector < group ? q_norm : k_norm))[8 * i + eighth];
    const Row row = rows[blockIdx.z];
    const Span s = span(row, cache, block, gridDim.x);
    const int fresh = (int)row.begin > s.first ? row.begin : s.first, pos = row.pos;   // keys from `fresh` on are of this batch
    if ((int)blockIdx.x >= s.parts) return;

    // A ring's rows: positions from `turned` on stand at its begin.
    const int capacity = cache.window ? cache.capacity : 0, turned = cache.window ? (s.last - 1) / capacity * capacity : 0;
    auto row_at = [&](int key) { return (u32)(key - turned + (key < turned ? capacity : 0)) * cache.width; };
#ifdef KV_Q8_0
    const Plane k_plane = PLANE(cache.k, row.slot, blockIdx.y), v_plane = PLANE(cache.v, row.slot, blockIdx.y);
    ChunkKeys keys;
    uint2 v_factors;   // of the values of key threadIdx.x of a chunk
    auto fetch_keys = [&](int chunk) {
        const int base = s.last - CHUNK * (chunk + 1) + warp * 16;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int key = base + tile * 8 + g, mine = base + tile * 8 + 2 * t;
            if (key >= s.first && key < fresh) keys.read(tile, k_plane.at + row_at(key), t);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (mine + i >= s.first && mine + i < fresh) keys.factors[tile][i] = *(const uint2*)(k_plane.factors + row_at(mine + i) / 32);
        }
    };
    auto fetch_values = [&](int chunk, int stage) {
        const int base = s.last - CHUNK * (chunk + 1), mine = base + (int)threadIdx.x, c = threadIdx.x & 7;
#pragma unroll
        for (int i = 0; i < CHUNK / 32; ++i) {
            const int at = i * 32 + (threadIdx.x >> 3), key = base + at;
            if (key >= s.first && key < fresh) copy16_near((u32)__cvta_generic_to_shared(shared + stage * STAGE + at * V_ROW + c * 16), v_plane.at + row_at(key) + c * 16);
        }
        v_factors = make_uint2(0, 0);
        if (threadIdx.x < CHUNK && mine >= s.first && mine < fresh) v_factors = *(const uint2*)(v_plane.factors + row_at(mine) / 32);
        commit();
    };
    keys.clear();
#else
    u16* const k_plane = ((u16**)cache.k)[row.slot] + blockIdx.y * HD;
    u16* const v_plane = ((u16**)cache.v)[row.slot] + blockIdx.y * HD;
    // Of `chunk`, a lane's pieces of keys g and 8 + g of its warp's 16, piece 4i + t at i.
    uint4 keys[2][4];
    auto fetch_keys = [&](int chunk) {
        const int base = s.last - CHUNK * (chunk + 1) + warp * 16 + g;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int key = base + tile * 8;
            if (key < s.first || key >= fresh) continue;
            const uint4* from = (const uint4*)(k_plane + row_at(key)) + t;
#pragma unroll
            for (int i = 0; i < 4; ++i) keys[tile][i] = from[4 * i];
        }
    };
    auto fetch_values = [&](int chunk, int stage) {
        const int base = s.last - CHUNK * (chunk + 1) + (threadIdx.x >> 4), c = threadIdx.x & 15;
        u8* to = shared + stage * STAGE + (threadIdx.x >> 4) * V_ROW + c * 16;
#pragma unroll
        for (int i = 0; i < CHUNK / 16; ++i) {
            const int key = base + i * 16;
            if (key >= fresh) continue;
            if (key < s.first) *(uint4*)(to + i * 16 * V_ROW) = make_uint4(0, 0, 0, 0);
            else copy16_near((u32)__cvta_generic_to_shared(to + i * 16 * V_ROW), v_plane + row_at(key) + c * 8);
        }
        commit();
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) keys[i >> 2][i & 3] = make_uint4(0, 0, 0, 0);
#endif
    fetch_keys(blockIdx.x);
    fetch_values(blockIdx.x, 0);
    const int count = group + (blockIdx.x == 0 ? 2 * (s.last - fresh) : 0);
    auto key_of = [&](int n) { return n < group || n >= count ? pos : fresh + ((n - group) >> 1); };
    // Cosines and sines: of a lane's pairs in turn, or of its first eight elements, whose partners are its last eight.
    auto fetch_angles = [&](int key) {
        const float4* at = (const float4*)(angles + (u64)key * (HD / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = at[rope == 1 ? 8 * i + eighth : (i >> 1) * 16 + 2 * eighth + (i & 1)];
    };
    if (rope) fetch_angles(key_of(vector));
    wait_previous();
    // What follows may start, and fetch its weights, when the keys are under way.
    if ((int)blockIdx.x + s.parts >= s.chunks) allow_next();

#pragma unroll 1
    for (int first = 0; first + warp * 4 < count; first += 32) {
        const int n = first + vector, what = n < group ? 0 : 1 + ((n - group) & 1), key = key_of(n);
        const int planes = n >= count ? 0 : what == 0 ? q.count : what == 1 ? k.count : v.count, at_row = (int)blockIdx.z + key - pos;
        const u64 stride = (what == 0 ? q.stride : what == 1 ? k.stride : v.stride) / 4;
        const float4* p = (const float4*)((what == 0 ? q.p : what == 1 ? k.p : v.p) + (what == 0 ? at_row * heads + blockIdx.y * group + n : at_row * cache.kv_heads + blockIdx.y) * HD) + eighth;
        float4 x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = planes > 0 ? p[8 * i] : make_float4(0, 0, 0, 0);
            y[i] = planes > 1 ? p[stride + 8 * i] : make_float4(0, 0, 0, 0);
        }
#pragma unroll 1
        for (int plane = 2; plane < planes; ++plane)
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = add4(y[i], p[plane * stride + 8 * i]);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = add4(x[i], y[i]);
            sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
        }
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (what < 2) {
            const float unit_length = rsqrtf(sum / (float)HD + eps);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = make_float4(x[i].x * unit_length * norm[i].x, x[i].y * unit_length * norm[i].y, x[i].z * unit_length * norm[i].z, x[i].w * unit_length * norm[i].w);
            if (rope == 1) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 a = turn(x[i].x, x[i].y, c[i].x, c[i].y), b = turn(x[i].z, x[i].w, c[i].z, c[i].w);
                    x[i] = make_float4(a.x, a.y, b.x, b.y);
                }
            } else if (rope == 2) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 a = turn(x[i].x, x[2 + i].x, c[2 * i].x, c[2 * i].y), b = turn(x[i].y, x[2 + i].y, c[2 * i].z, c[2 * i].w);
                    const float2 e = turn(x[i].z, x[2 + i].z, c[2 * i + 1].x, c[2 * i + 1].y), f = turn(x[i].w, x[2 + i].w, c[2 * i + 1].z, c[2 * i + 1].w);
                    x[i] = make_float4(a.x, b.x, e.x, f.x);
                    x[2 + i] = make_float4(a.y, b.y, e.y, f.y);
                }
            }
        }
#ifdef KV_Q8_0
        if (n < count && what == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) ((uint2*)(shared + Q_AT + n * Q_ROW))[8 * i + eighth] = make_uint2(floats_to_half2(x[i].x, x[i].y), floats_to_half2(x[i].z, x[i].w));
        }
        if (first + warp * 4 + 3 >= group) {   // the warp has more than queries
            u32 packed[4];
            const uint2 factors = quantise(x, packed);
            const u32 kept = row_at(key), mine = key == pos;
            const u16 factor = (u16)((eighth < 2 ? factors.x : factors.y) >> (eighth & 1) * 16);
            u8* const to = shared + (what == 1 ? K_AT + (key - fresh) * K_ROW : (CHUNK + key - s.last) * V_ROW);
            if (n < count && what > 0) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    ((u32*)to)[8 * i + eighth] = packed[i];
                    if (mine) ((u32*)((what == 1 ? k_plane.at : v_plane.at) + kept))[8 * i + eighth] = packed[i];
                }
                if (eighth < 4) {
                    if (what == 1) ((u16*)(to + HD))[eighth] = factor;
                    else ((u16*)(shared + VALUES))[eighth * CHUNK + CHUNK + key - s.last] = factor;
                    if (mine) (what == 1 ? k_plane.factors : v_plane.factors)[kept / 32 + eighth] = factor;
                }
            }
        }
#else
        if (n < count) {
            u8* to = shared + (what == 0 ? Q_AT + n * Q_ROW : what == 1 ? K_AT + (key - fresh) * Q_ROW : (CHUNK + key - s.last) * V_ROW);
            u16* kept = (what == 1 ? k_plane : v_plane) + row_at(key);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint2 w = make_uint2(floats_to_half2(x[i].x, x[i].y), floats_to_half2(x[i].z, x[i].w));
                ((uint2*)to)[8 * i + eighth] = w;
                if (what > 0 && key == pos) ((uint2*)kept)[8 * i + eighth] = w;
            }
        }
#endif
        if (first + 32 + warp * 4 < count) {
            // Queries are done.
#pragma unroll
            for (int i = 0; i < 4; ++i) norm[i] = ((const float4*)k_norm)[8 * i + eighth];
            if (rope) fetch_angles(key_of(n + 32));
        }
    }
    __syncthreads();

    u32 queries[8][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint4 w = g + 8 * r < group ? ((const uint4*)(shared + Q_AT + (g + 8 * r) * Q_ROW))[4 * i + t] : make_uint4(0, 0, 0, 0);
            queries[2 * i][r] = w.x;
            queries[2 * i][2 + r] = w.y;
            queries[2 * i + 1][r] = w.z;
            queries[2 * i + 1][2 + r] = w.w;
        }
    // Maxima stay in units of the raw product. o: even and odd steps, dimensions of one parity.
    float max[2] = {-1.0e30f, -1.0e30f}, sum[2] = {0.0f, 0.0f}, o[2][2][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) o[i >> 3][(i >> 2) & 1][i & 3] = 0.0f;
    // Of heads g and g + 8 this lane will hold four dimensions.
    const bool whole = s.parts == 1, gated = gate.p != 0;
    auto out_at = [&](int r) { return (blockIdx.z * heads + blockIdx.y * group + g + 8 * r) * HD + warp * 16 + t * 4; };
    int stage = 0;
#pragma unroll 1
    for (int chunk = blockIdx.x; chunk < s.chunks; chunk += s.parts, stage ^= 1) {
        const int at = s.last - CHUNK * (chunk + 1) + warp * 16;
        if (chunk == 0 && at + 16 > fresh) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int key = at + tile * 8 + g;
#ifdef KV_Q8_0
                if (key >= fresh) keys.read(tile, shared + K_AT + (key - fresh) * K_ROW, t);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int mine = at + tile * 8 + 2 * t + i;
                    if (mine >= fresh) keys.factors[tile][i] = *(const uint2*)(shared + K_AT + (mine - fresh) * K_ROW + HD);
                }
#else
                if (key < fresh) continue;
                const uint4* from = (const uint4*)(shared + K_AT + (key - fresh) * Q_ROW) + t;
#pragma unroll
                for (int i = 0; i < 4; ++i) keys[tile][i] = from[4 * i];
#endif
            }
        }
#ifdef KV_Q8_0
        float c[2][1][4];
        keys.multiply(queries, c);
#else
        float c[2][2][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) c[i >> 3][(i >> 2) & 1][i & 3] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const uint4 w = keys[tile][i];
                const u32 *even = queries[2 * i], *odd = queries[2 * i + 1];
                mma(c[tile][0], even[0], even[1], even[2], even[3], w.x, w.y);
                mma(c[tile][1], odd[0], odd[1], odd[2], odd[3], w.z, w.w);
            }
#endif
        const int next_chunk = chunk + s.parts;
        if (next_chunk < s.chunks) {
            fetch_keys(next_chunk);
        } else if (whole && gated) {
            // Registers of keys hold the gate from here on: its first two planes.
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (g + 8 * r >= group) continue;
                SPARE(r, 0) = *(const uint4*)(gate.p + out_at(r));
                if (gate.count > 1) SPARE(r, 1) = *(const uint4*)(gate.p + out_at(r) + gate.stride);
            }
        }
        float top[2] = {-1.0e30f, -1.0e30f};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = at + tile * 8 + 2 * t + (i & 1);
#ifdef KV_Q8_0
                c[tile][0][i] = key >= s.first ? c[tile][0][i] : -1.0e30f;
#else
                c[tile][0][i] = key >= s.first ? c[tile][0][i] + c[tile][1][i] : -1.0e30f;
#endif
                top[i >> 1] = fmaxf(top[i >> 1], c[tile][0][i]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            if (t == 0) tops[(g + 8 * r) * 8 + warp] = top[r];
        }
#ifdef KV_Q8_0
        if (threadIdx.x < CHUNK && s.last - CHUNK * (chunk + 1) + (int)threadIdx.x < fresh) {
#pragma unroll
            for (int i = 0; i < 4; ++i) ((u16*)(shared + stage * STAGE + VALUES))[i * CHUNK + threadIdx.x] = (u16)((i < 2 ? v_factors.x : v_factors.y) >> (i & 1) * 16);
        }
#endif
        arrived<0>();
        __syncthreads();   // maxima and values are there, and the other stage is free
        if (next_chunk < s.chunks) {
            fetch_values(next_chunk, stage ^ 1);
            if (next_chunk + s.parts >= s.chunks) allow_next();
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float next = fmaxf(max[r], of_warps(tops, g + 8 * r, false)), shrink = exp2_fast((max[r] - next) * unit), shift = next * unit;
            max[r] = next;
            sum[r] *= shrink;
#pragma unroll
            for (int i = 0; i < 8; ++i) o[i >> 2][(i >> 1) & 1][2 * r + (i & 1)] *= shrink;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = c[i >> 1][0][2 * r + (i & 1)];
                x = exp2_fast(x * unit - shift);
                sum[r] += x;
            }
        }
        ((uint4*)(shared + P_AT))[warp * 32 + lane] = make_uint4(floats_to_half2(c[0][0][0], c[0][0][1]), floats_to_half2(c[0][0][2], c[0][0][3]),
                                                                 floats_to_half2(c[1][0][0], c[1][0][1]), floats_to_half2(c[1][0][2], c[1][0][3]));
        __syncthreads();   // weights are there
#ifdef KV_Q8_0
        const u32 values = (u32)__cvta_generic_to_shared(shared + stage * STAGE + lane * V_ROW + warp * 16);
        const u32* factors = (const u32*)(shared + stage * STAGE + VALUES) + (warp >> 1) * (CHUNK / 2) + t;
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step += 2) {
            // Of keys 16 step + 8i + 2t and the next, dimensions 2g and 2g + 1.
            const uint4 w4 = transposed(values + 16 * step * V_ROW);
            const u32 w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 a = ((const uint4*)(shared + P_AT))[(step + part) * 32 + lane];
                u32 even[2], odd[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 f = factors[8 * (step + part) + 4 * i];
                    even[i] = values2(__byte_perm(w[2 * part + i], BIASED, 0x4240), f);
                    odd[i] = values2(__byte_perm(w[2 * part + i], BIASED, 0x4341), f);
                }
                mma(o[part][0], a.x, a.y, a.z, a.w, even[0], even[1]);
                mma(o[part][1], a.x, a.y, a.z, a.w, odd[0], odd[1]);
            }
        }
#else
        const u8* values = shared + stage * STAGE + 2 * t * V_ROW + (warp * 8 + g) * 4;
#pragma unroll
        for (int step = 0; step < CHUNK / 16; ++step) {
            const uint4 a = ((const uint4*)(shared + P_AT))[step * 32 + lane];
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = *(const u32*)(values + (16 * step + (i & 1) + (i >> 1) * 8) * V_ROW);
            mma(o[step & 1][0], a.x, a.y, a.z, a.w, pack_low(w[0], w[1]), pack_low(w[2], w[3]));
            mma(o[step & 1][1], a.x, a.y, a.z, a.w, pack_high(w[0], w[1]), pack_high(w[2], w[3]));
        }
#endif
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        if (t == 0) tops[(g + 8 * r) * 8 + warp] = sum[r];
    }
    __syncthreads();
    float* mine = partial + ((u64)(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * PART;
    float* const halves = (float*)(shared + P_AT);   // sums of 16 dimensions: half of what a product takes as a group
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int head = g + 8 * r;
        float of_lane = 0.0f;
        if (head < group) {
            const float all = of_warps(tops, head, true);
            const float4 found = make_float4(o[0][0][2 * r] + o[1][0][2 * r], o[0][1][2 * r] + o[1][1][2 * r], o[0][0][2 * r + 1] + o[1][0][2 * r + 1], o[0][1][2 * r + 1] + o[1][1][2 * r + 1]);
            if (whole) {
                float4 gates = floats(SPARE(r, 0));
#pragma unroll 1
                for (int i = 1; i < gate.count; ++i) gates = add4(gates, i == 1 ? floats(SPARE(r, 1)) : *(const float4*)(gate.p + out_at(r) + i * gate.stride));
                const float4 x = gated_by(found, 1.0f / all, gated, gates);
                const uint2 w = make_uint2(floats_to_half2(x.x, x.y), floats_to_half2(x.z, x.w));
                if (out.t) {
                    const u32 e = (blockIdx.y * group + head) * HD + warp * 16 + t * 4;
                    put_tile(out, blockIdx.z, e, w);
                    of_lane = sum_halves(w);
                } else {
                    *(float4*)(out.f + out_at(r)) = x;
                    *(uint2*)(out.h + out_at(r)) = w;
                }
            } else {
                *(float4*)(mine + head * HD + warp * 16 + t * 4) = found;
                if (warp == 0 && t == 0) *(float2*)(mine + 16 * HD + 2 * head) = make_float2(max[r], all);
            }
        }
        if (whole && out.t) {
            of_lane += __shfl_xor_sync(0xffffffffu, of_lane, 1);
            of_lane += __shfl_xor_sync(0xffffffffu, of_lane, 2);
            if (t == 0 && head < group) halves[head * 8 + warp] = of_lane;
        }
    }
    if (!whole || !out.t) return;
    __syncthreads();
    if ((int)threadIdx.x < group * 4) {
        const u32 e = blockIdx.y * group * HD + threadIdx.x * 32;
        put_sum(out, blockIdx.z, e, halves[2 * threadIdx.x] + halves[2 * threadIdx.x + 1]);
    }
}

// Joins the parts (at most 128) of a head whose keys are split, and applies the gate. all: whether there are `splits` of each row, as attend_wide.cu leaves
// them, not as many as attend_few does. grid: (heads, rows), 128 threads: a lane has four
// dimensions, a warp every fourth part.
extern "C" __global__ void __launch_bounds__(128) attend_join(const Row* rows, const float* partial, int heads, const Cache cache, int block, int splits, int all, float scale, const Planes gate, const Activation out) {
    __shared__ float weights[128], tops[4], sums[4];
    __shared__ float4 found[4][32];
    allow_next();
    const int head = blockIdx.x, group = heads / cache.kv_heads, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int parts = all ? splits : span(rows[blockIdx.y], cache, block, splits).parts;
    const float unit = scale * 1.4426950408889634f * RAW;
    wait_previous();
    if (parts == 1) return;
    const float* from = partial + (u64)(blockIdx.y * cache.kv_heads + head / group) * splits * PART;
    const u64 at = ((u64)blockIdx.y * heads + head) * HD + lane * 4;
    float4 gates = make_float4(0, 0, 0, 0), x[4];
    if (gate.p && warp == 0)
#pragma unroll 2
        for (int i = 0; i < gate.count; ++i) gates = add4(gates, *(const float4*)(gate.p + at + i * gate.stride));
    const float2 mine = (int)threadIdx.x < parts ? *(const float2*)(from + threadIdx.x * PART + 16 * HD + 2 * (head % group)) : make_float2(-1.0e30f, 0.0f);
    from += (head % group) * HD + lane * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = warp + 4 * i < parts ? *(const float4*)(from + (warp + 4 * i) * PART) : make_float4(0, 0, 0, 0);
    float top = warp_max(mine.x);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    const float weight = exp2_fast((mine.x - top) * unit);
    weights[threadIdx.x] = weight;
    const float sum = warp_sum(weight * mine.y);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    float4 joined = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) joined = fma4(weights[warp + 4 * i], x[i], joined);
#pragma unroll 4
    for (int p = warp + 16; p < parts; p += 4) joined = fma4(weights[p], *(const float4*)(from + p * PART), joined);
    found[warp][lane] = joined;
    __syncthreads();
    if (warp > 0) return;
    joined = add4(add4(found[0][lane], found[1][lane]), add4(found[2][lane], found[3][lane]));
    put4(out, blockIdx.y, head * HD + lane * 4, heads * HD, gated_by(joined, 1.0f / (sums[0] + sums[1] + sums[2] + sums[3]), gate.p != 0, gates));
}
