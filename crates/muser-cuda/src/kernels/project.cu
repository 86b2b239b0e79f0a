// Matrices times 1 to 16 activation rows on tensor cores, straight from the tiles of layout.cuh.
// Layout: a block holds the activations (f16) of its share of the columns; each of its 8 or 16 warps takes an equal run of the list
// of tiles (16 rows by 256 columns, row after row), with a ring of them on the way from memory, filled before the kernels ahead
// are done. Rows of tiles that a warp has alone it writes; those cut between warps are joined at the end, in the warps' order.
// Where a row of tiles is cut between two blocks, the second part goes to plane 1; with columns in slices, each slice has a plane.
// Bytes: the weights, once for all rows. Operations: 2 a weight and row, with 16 rows or 8 paid for.
// Memory binds; about 70 instructions for 32 weights of a lane (Q4K) stay under it.
// Mirrors of the structs in launch.rs.
struct Segment {
    const u8* w;
    float* out;
    u64 plane;      // elements from plane to plane of out
    int rows, tiles, stride;
    float scale;
};
struct Product {
    Segment seg[4];
    int segments, tiles, cols, n;
    int slices, pad;
    Masks masks;
};

// Groups have one block a multiprocessor, with as many warps as two or three small ones.
#define WARPS (COLUMNS > 4 ? 16 : 8)
#define THREADS (WARPS * 32)
#define PARTS (TYPE == F16 ? 4 : 1)
#define PART_BYTES (tile_bytes(TYPE) / PARTS)
#define STAGES (TYPE == F16 ? 4 : TYPE == Q8 || TYPE == Q6K || WARPS > 8 ? 2 : 3)
#define NT (COLUMNS > 8 ? 2 : 1)
#define SUMS (TYPE == Q4K || TYPE == Q5K)

__device__ __forceinline__ void fetch(u32 to, const u8* from, int lane) {
#pragma unroll
    for (int o = 0; o < PART_BYTES; o += 512)
        if (o + 512 <= PART_BYTES || o + lane * 16 < PART_BYTES) copy16(to + o + lane * 16, from + o + lane * 16);
}

// Where a lane reads in every tile.
struct Lane {
    u32 piece, head, word, next, shift;
    Masks masks;
};

// One step of both rows against all activation rows.
__device__ __forceinline__ void multiply(float acc[2][4], const u32* f0, const u32* f1, const u32 x[NT], int at) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        uint4 b = lds128(x[n] + at * 2);
        // One tile of columns: two sums, so that products do not wait for each other.
        mma(acc[NT == 2 ? n : 0], f0[0], f1[0], f0[1], f1[1], b.x, b.y);
        mma(acc[NT == 2 ? n : 1], f0[2], f1[2], f0[3], f1[3], b.z, b.w);
    }
}

// A tile (or part `part` of one) at address u against the activations of its columns.
// x: per 256 columns [half][step][t] 8 halves, from the lane's first on.
__device__ __forceinline__ void consume(float acc[2][4], u32 u, const u32 x[NT], const u32 sums[NT], int part, const Lane& l) {
    if (TYPE == F16) {
        u32 from = x[0] + ((part >> 1) * 128 + (part & 1) * 64) * 2, from2 = NT == 2 ? x[NT - 1] + (from - x[0]) : 0;
        const u32 at[2] = {from, from2};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            uint4 a = lds128(u + s * 512 + l.piece), b = lds128(u + 1024 + s * 512 + l.piece);
            multiply(acc, (const u32*)&a, (const u32*)&b, at, s * 32);
        }
        return;
    }
    u32 scales[2][2], minima[2];
    if (SUMS) {
#pragma unroll
        for (int r = 0; r < 2; ++r) k_scales(lds32(u + l.head + r * 128), lds32(u + l.word + r * 128), lds32(u + l.next + r * 128), l.shift, scales[r][0], minima[r]);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma8(acc[n], minima[0], minima[1], lds32(sums[n]));
    } else {
        uint2 s = lds64(u + l.head);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scales[r][0] = r ? s.y : s.x;
            if (TYPE == FP4) {
                u32 w = scales[r][0];
                scales[r][0] = fp4_scales(w, 0);
                scales[r][1] = fp4_scales(w, 1);
            }
            if (TYPE == Q6K) {
                u32 d = twice_low(lds16(u + l.word + r * 16)), w = scales[r][0];
                scales[r][0] = hmul2(hadd2(__byte_perm(w, 0x64646464, 0x4140), 0xe480e480), d);
                scales[r][1] = hmul2(hadd2(__byte_perm(w, 0x64646464, 0x4342), 0xe480e480), d);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 q[2], q2[2];
        u32 h[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int piece = (r * 2 + half) * 512;
            if (TYPE == Q8) {
                q[r] = lds128(u + l.piece + piece * 2);
                q2[r] = lds128(u + l.piece + piece * 2 + 512);
            } else {
                q[r] = lds128(u + l.piece + piece);
            }
            if (TYPE == Q5K) h[r][0] = lds32(u + 2048 + l.piece / 4 + piece / 4);
            if (TYPE == Q6K) {
                uint2 high = lds64(u + 2048 + l.piece / 2 + piece / 2);
                h[r][0] = high.x;
                h[r][1] = high.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 f[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32* w = (const u32*)&q[r];
                if (TYPE == Q6K || TYPE == FP4) {
                    u32 s = i < 2 ? twice_low(scales[r][half]) : twice_high(scales[r][half]);
                    if (TYPE == FP4) nibbles_fp4(w[i], s, f[r]);
                    else nibbles6(w[i], h[r][i >> 1], i & 1, s, l.masks, f[r]);
                } else {
                    u32 s = half ? twice_high(scales[r][0]) : twice_low(scales[r][0]);
                    if (TYPE == Q8) {
                        const u32* wide = i < 2 ? w : (const u32*)&q2[r];
                        bytes8(wide[(i & 1) * 2], wide[(i & 1) * 2 + 1], s, f[r]);
                    } else if (TYPE == Q5K) {
                        nibbles5(w[i], h[r][0], i, s, l.masks, f[r]);
                    } else if (TYPE == IQ4) {
                        nibbles_iq4(w[i], s, f[r]);
                    } else {
                        nibbles(w[i], s, TYPE, l.masks, f[r]);
                    }
                }
            }
            multiply(acc, f[0], f[1], x, half * 128 + i * 32);
        }
    }
}

extern __shared__ uint4 shared_bytes[];

// The tile that a warp fetches next.
struct Cursor {
    const u8* p;
    u32 at, tiles;   // its part of the row of tiles; rows of tiles left in the segment
    int segment;
};
__device__ __forceinline__ const u8* start_of(const Product& a, int s) { return s == 0 ? a.seg[0].w : s == 1 ? a.seg[1].w : s == 2 ? a.seg[2].w : a.seg[3].w; }
__device__ __forceinline__ u32 tiles_of(const Product& a, int s) { return s == 0 ? a.seg[0].tiles : s == 1 ? a.seg[1].tiles : s == 2 ? a.seg[2].tiles : a.seg[3].tiles; }

// Part of a row of tiles that a warp had not alone.
struct Partial {
    u32 tile, begin, end;   // tile ~0: none
};

// Sums of a row of tiles, of which begin..end were multiplied, to their planes. Lane i holds sum i, i + 32, ... of [column][16 rows].
__device__ __forceinline__ void write(const Product& a, u32 tile, bool starts, bool ends, const float* sums) {
    const int lane = threadIdx.x & 31;
    u32 local = tile;
    int s = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i)
        if (s == i && i + 1 < a.segments && local >= (u32)a.seg[i].tiles) { local -= a.seg[i].tiles; s = i + 1; }
    float* base = s == 0 ? a.seg[0].out : s == 1 ? a.seg[1].out : s == 2 ? a.seg[2].out : a.seg[3].out;
    const u64 plane = s == 0 ? a.seg[0].plane : s == 1 ? a.seg[1].plane : s == 2 ? a.seg[2].plane : a.seg[3].plane;
    const u32 rows = s == 0 ? a.seg[0].rows : s == 1 ? a.seg[1].rows : s == 2 ? a.seg[2].rows : a.seg[3].rows;
    const u32 stride = s == 0 ? a.seg[0].stride : s == 1 ? a.seg[1].stride : s == 2 ? a.seg[2].stride : a.seg[3].stride;
    const float scale = s == 0 ? a.seg[0].scale : s == 1 ? a.seg[1].scale : s == 2 ? a.seg[2].scale : a.seg[3].scale;
#pragma unroll
    for (int i = 0; i < (16 * COLUMNS + 31) / 32; ++i) {
        u32 at = i * 32 + lane, row = local * 16 + (at & 15), c = at >> 4;
        if (row >= rows || c >= (u32)a.n) continue;
        float* out = base + (u64)c * stride + row;
        float v = sums[i] * scale;
        if (a.slices > 1) {
            out[blockIdx.y * plane] = v;
        } else {
            out[starts ? 0 : plane] = v;
            if (starts && ends) out[plane] = 0.0f;
        }
    }
}

// grid: (blocks, slices), THREADS threads. Shared: rings, partial sums and what they are of, activations, group sums (see Shape in
// product.rs).
extern "C" __global__ void __launch_bounds__(THREADS, COLUMNS <= 4 ? 3 : 1) project(const Product a, const u16* x, const u32 x_stride) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u8* ring = (u8*)shared_bytes + warp * STAGES * PART_BYTES;
    float* sums_of = (float*)((u8*)shared_bytes + WARPS * STAGES * PART_BYTES);
    Partial* partials = (Partial*)(sums_of + 2 * WARPS * 16 * COLUMNS);
    u16* xs = (u16*)(partials + 32);
    const u32 all = (a.cols + 255) / 256, most = (all + a.slices - 1) / a.slices, first = blockIdx.y * most;
    const u32 blocks = first >= all ? 0 : (all - first < most ? all - first : most), parts = blocks * PARTS;
    const u32 x_row = most * 256 + 32, sum_row = most * 8 + 8;
    u16* sums = xs + COLUMNS * x_row;
    // This block's run of the list of tiles: whole rows of tiles where slices leave their own planes.
    const u32 whole = a.slices == 1 ? 1 : parts, list = a.slices == 1 ? (u32)a.tiles * parts : (u32)a.tiles;
    const u32 block_from = list * blockIdx.x / gridDim.x * whole, block_to = list * (blockIdx.x + 1) / gridDim.x * whole;
    const u32 share = block_to - block_from, from = block_from + share * warp / WARPS, to = block_from + share * (warp + 1) / WARPS;
    const u32 ring_at = (u32)__cvta_generic_to_shared(ring);
    u32 next = from;
    Cursor c = {0, 0, 0, 0};
    const u64 gap = (u64)(all - blocks) * tile_bytes(TYPE);
    u32 tile = 0, done = 0;   // of the part that is multiplied next
    if (from < to) {
        tile = from / parts;
        done = c.at = from - tile * parts;
        u32 local = tile;
        while (local >= tiles_of(a, c.segment)) local -= tiles_of(a, c.segment++);
        c.tiles = tiles_of(a, c.segment) - local;
        c.p = start_of(a, c.segment) + ((u64)local * all + first) * tile_bytes(TYPE) + c.at * PART_BYTES;
    }
    auto advance = [&]() {
        next += 1;
        c.p += PART_BYTES;
        c.at += 1;
        if (c.at == parts && next < to) {
            c.at = 0;
            c.p += gap;
            if (--c.tiles == 0) {
                c.segment += 1;
                c.tiles = tiles_of(a, c.segment);
                c.p = start_of(a, c.segment) + (u64)first * tile_bytes(TYPE);
            }
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (next < to) {
            fetch(ring_at + s * PART_BYTES, c.p, lane);
            advance();
        }
        commit();
    }
    allow_next();
    wait_previous();
    // Activations, 16 bytes a thread; four loads on the way at once.
    const u32 chunks = COLUMNS * blocks * 32;
    for (u32 base = 0; base < chunks; base += 4 * THREADS) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 i = base + k * THREADS + threadIdx.x, col = COLUMNS == 1 ? 0 : i / (blocks * 32), at = first * 256 + (i - col * blocks * 32) * 8;
            u32 row = (int)col < a.n ? col : a.n - 1;
            v[k] = make_uint4(0, 0, 0, 0);
            if (i < chunks && at < (u32)a.cols) v[k] = *(const uint4*)(x + (u64)row * x_stride + at);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 i = base + k * THREADS + threadIdx.x, col = COLUMNS == 1 ? 0 : i / (blocks * 32), ch = i - col * blocks * 32;
            if (i < chunks) *(uint4*)(xs + col * x_row + (ch >> 5) * 256 + ((ch >> 4) & 1) * 128 + (ch & 3) * 32 + ((ch >> 2) & 3) * 8) = v[k];
            if (SUMS) {
                float total = half_to_float((u16)v[k].x) + half_to_float((u16)(v[k].x >> 16)) + half_to_float((u16)v[k].y) + half_to_float((u16)(v[k].y >> 16));
                total += half_to_float((u16)v[k].z) + half_to_float((u16)(v[k].z >> 16)) + half_to_float((u16)v[k].w) + half_to_float((u16)(v[k].w >> 16));
                total += __shfl_xor_sync(0xffffffffu, total, 1);
                total += __shfl_xor_sync(0xffffffffu, total, 2);
                if (i < chunks && (ch & 3) == 0) sums[col * sum_row + (ch >> 2)] = float_to_half(total);
            }
        }
    }
    if (threadIdx.x < 32) partials[threadIdx.x].tile = ~0u;
    __syncthreads();
    // Addresses of this lane in the activations, the sums and every tile.
    u32 x_at[NT], sums_at[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int col = (n * 8 + g) & (COLUMNS - 1);
        x_at[n] = keep((u32)__cvta_generic_to_shared(xs + col * x_row + t * 8));
        sums_at[n] = keep((u32)__cvta_generic_to_shared(sums + col * sum_row + t * 2));
    }
    const u32 head = head_at(TYPE);
    const Lane l = {keep(lane * 16), keep(SUMS ? head + g * 16 : head + lane * 8), keep(SUMS ? head + g * 16 + k_word(t) * 4 : Q6K_D + g * 2),
                    keep(head + g * 16 + k_next(t) * 4), keep(k_shift(t)), a.masks};
    u32 unit = from;
    int stage = 0, slot = 2 * warp;
#pragma unroll 1
    while (unit < to) {
        const u32 begin = done, left = to - unit, end = parts - done < left ? parts : done + left;
        float acc[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        unit += end - begin;
#pragma unroll 1
        for (; done < end; ++done) {
            const u32 columns = done / PARTS * 512, groups = done / PARTS * 16;
            const u32 x_here[2] = {x_at[0] + columns, x_at[NT - 1] + columns}, sums_here[2] = {sums_at[0] + groups, sums_at[NT - 1] + groups};
            arrived<STAGES - 1>();
            __syncwarp();
            consume(acc, keep(ring_at + stage * PART_BYTES), x_here, sums_here, done % PARTS, l);
            __syncwarp();
            if (next < to) {
                fetch(ring_at + stage * PART_BYTES, c.p, lane);
                advance();
            }
            commit();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        float* mine = sums_of + slot * 16 * COLUMNS;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int col = n * 8 + 2 * t + (i & 1);
                float v = NT == 2 ? acc[n][i] : acc[0][i] + acc[1][i];
                if (col < COLUMNS) mine[col * 16 + g + 8 * (i >> 1)] = v;
            }
        __syncwarp();
        if (begin == 0 && end == parts) {
            float v[(16 * COLUMNS + 31) / 32];
#pragma unroll
            for (int i = 0; i < (16 * COLUMNS + 31) / 32; ++i) v[i] = COLUMNS > 1 || lane < 16 ? mine[i * 32 + lane] : 0.0f;
            write(a, tile, true, true, v);
            __syncwarp();
        } else {
            if (lane == 0) partials[slot] = {tile, begin, end};
            slot += 1;
        }
        tile += 1;
        done = 0;
    }
    __syncthreads();
    // The first warp of a cut row of tiles joins its parts: they stand one after another.
#pragma unroll 1
    for (int s = 2 * warp; s < 2 * warp + 2; ++s) {
        const Partial p = partials[s];
        if (p.tile == ~0u) break;
        int before = s - 1;
        while (before >= 0 && partials[before].tile == ~0u) --before;
        if (before >= 0 && partials[before].tile == p.tile) continue;
        float v[(16 * COLUMNS + 31) / 32];
#pragma unroll
        for (int i = 0; i < (16 * COLUMNS + 31) / 32; ++i) v[i] = 0.0f;
        u32 end = p.end;
#pragma unroll 1
        for (int other = s; other < 2 * WARPS; ++other) {
            if (partials[other].tile == ~0u) continue;
            if (partials[other].tile != p.tile) break;
            end = partials[other].end;
#pragma unroll
            for (int i = 0; i < (16 * COLUMNS + 31) / 32; ++i)
                if (COLUMNS > 1 || lane < 16) v[i] += sums_of[other * 16 * COLUMNS + i * 32 + lane];
        }
        write(a, p.tile, p.begin == 0, end == parts, v);
    }
}

// Dequantises a matrix to row-major f16 for a product on many rows, multiplied with `factor` (twice in a register). grid: ceil(tiles *
// blocks * 128 / 256), 256 threads, a piece each; two tiles are gathered in shared memory, so that whole rows of them are written.
// Bytes: the weights once, four times as many f16. Memory binds.
extern "C" __global__ void __launch_bounds__(256) widen(const u8* w, u32 rows, u32 cols, u32 factor, u16* out) {
    __shared__ uint4 wide[2][16 * 32];   // [row][16 bytes], where the lanes of a quarter warp meet eight different banks
    const Masks m = {0x000f000f, 0x00f000f0};
    allow_next();
    wait_previous();
    const u32 blocks = (cols + 255) / 256, tiles = (rows + 15) / 16 * blocks, at = blockIdx.x * 2 + (threadIdx.x >> 7);
    const u32 piece = threadIdx.x & 127, r = piece >> 6, half = (piece >> 5) & 1, lane = piece & 31, g = lane >> 2, t = lane & 3, row = r * 8 + g;
    uint4* mine = wide[threadIdx.x >> 7];
    if (at < tiles) {
        const u8* u = w + (u64)at * tile_bytes(TYPE);
        const u8* head = u + head_at(TYPE);
        u32 scale = 0, second = 0, minimum = 0;
        if (SUMS) {
            const u32 *h = (const u32*)(head + row * 16), of_minima = half * 2 + (t >> 1);
            u32 scales, minima, other;
            k_scales(h[0], h[k_word(t)], h[k_next(t)], k_shift(t), scales, other);
            k_scales(h[0], h[k_word(of_minima)], h[k_next(of_minima)], k_shift(of_minima), other, minima);
            scale = half ? twice_high(scales) : twice_low(scales);
            minimum = t & 1 ? twice_high(minima) : twice_low(minima);
        } else if (TYPE == Q6K) {
            u32 s = ((const u16*)(head + lane * 8))[r * 2 + half], d = twice_low(((const u16*)(u + Q6K_D))[row]);
            s = hmul2(hadd2(__byte_perm(s, 0x64646464, 0x4140), 0xe480e480), d);
            scale = twice_low(s);
            second = twice_high(s);
        } else if (TYPE == FP4) {
            u32 s = fp4_scales(((const u16*)(head + lane * 8))[r * 2 + half], 0);
            scale = twice_low(s);
            second = twice_high(s);
        } else if (TYPE != F16) {
            scale = twice_low(((const u16*)head)[lane * 4 + r * 2 + half]);
        }
        uint4 q[4];
        uint2 high = make_uint2(0, 0);
        if (TYPE == F16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) q[i] = *(const uint4*)(u + (half * 2 + (i >> 1)) * 2048 + ((r * 2 + (i & 1)) * 32 + lane) * 16);
        } else if (TYPE == Q8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) q[i] = *(const uint4*)(u + ((piece >> 5) * 2 + i) * 512 + lane * 16);
        } else {
            q[0] = ((const uint4*)u)[piece];
            if (TYPE == Q5K) high.x = ((const u32*)(u + 2048))[piece];
            if (TYPE == Q6K) high = ((const uint2*)(u + 2048))[piece];
        }
        const u32* words = (const u32*)q;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 f[4];
            if (TYPE == F16) {
#pragma unroll
                for (int k = 0; k < 4; ++k) f[k] = words[4 * i + k];
            } else if (TYPE == Q8) {
                bytes8(words[2 * i], words[2 * i + 1], scale, f);
            } else if (TYPE == Q6K) {
                nibbles6(words[i], i < 2 ? high.x : high.y, i & 1, i < 2 ? scale : second, m, f);
            } else if (TYPE == FP4) {
                nibbles_fp4(words[i], i < 2 ? scale : second, f);
            } else if (TYPE == IQ4) {
                nibbles_iq4(words[i], scale, f);
            } else if (TYPE == Q5K) {
                nibbles5(words[i], high.x, i, scale, m, f);
            } else {
                nibbles(words[i], scale, TYPE, m, f);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) f[k] = hmul2(SUMS ? hadd2(f[k], minimum) : f[k], factor);
            mine[row * 32 + ((half * 16 + t * 4 + i) ^ (t >> 1) ^ ((row & 1) << 1))] = make_uint4(f[0], f[1], f[2], f[3]);
        }
    }
    __syncthreads();
    if (at >= tiles) return;
    const u32 first = at % blocks * 256 + (threadIdx.x & 31) * 8, top = at / blocks * 16;
    if (first >= cols) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 from = (piece >> 5) * 4 + i, c = threadIdx.x & 31;
        if (top + from < rows) *(uint4*)(out + (u64)(top + from) * cols + first) = mine[from * 32 + (c ^ ((c >> 3) & 1) ^ ((from & 1) << 1))];
    }
}
