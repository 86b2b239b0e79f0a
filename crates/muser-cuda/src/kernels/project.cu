// Matrices times 1 to 16 activation rows on tensor cores, straight from the tiles of layout.cuh.
// Layout: a block holds the activations (f16) of its share of the columns; each of its WARPS warps takes an equal run of the list
// of tiles (16 rows by 256 columns, row after row), with a ring of them on the way from memory, filled before the kernels ahead
// are done. Where TEAM is 4, a warpgroup has four rows of tiles at once instead, a warp each, so that one read of activations serves 64 rows of
// weights: `tiles` of a list then are such fours. Rows of tiles that a warp has alone it writes; those cut between warps are joined at the end, in the warps' order.
// Where a row of tiles is cut between two blocks, the second part goes to plane 1; with columns in slices, each slice has a plane.
// One or two activation rows: quants are multiplied as they are. A product's eight columns are the four groups of 32 that the
// lanes of a row hold, times two rows, so that sums of one group stand alone and are scaled, instead of every weight. More rows need
// all eight columns, and weights are scaled first.
// Where SIDE is defined, the last blocks multiply a second product, whose matrices have that type.
// Bytes: the weights, once for all rows. Operations: 2 a weight and row, with 16 rows or 8 paid for.
// Memory and instructions bind together: 50 for 32 weights of a lane (Q4K, one or two rows; 64 for more). With 16 rows the reads of
// activations from shared memory take nearly as long.
// Mirrors of the structs in launch.rs.
struct Segment {
    const u8* w;
    float* out;
    u64 plane;      // elements from plane to plane of out
    int rows, tiles, stride;   // tiles: rows of them, or TEAM together
    float scale;
};
struct Product {
    Segment seg[4];
    int segments, tiles, cols, n;
    int slices, blocks;   // blocks of a slice
    Masks masks;
    int late, less;       // blocks of a slice that start last, its first ones; what they have of the list of tiles
};

// One or two rows have three blocks a multiprocessor, which begin and end one after another; more have one, that reads them once.
#define THREADS (WARPS * 32)

extern __shared__ uint4 shared_bytes[];

// Where a block's part of a list of tiles begins.
__device__ __forceinline__ u32 first_of(const Product& a, u32 list, u32 block) {
    const u32 late = a.late, less = a.less;
    return block < late ? less * block / late : less + (list - less) * (block - late) / (a.blocks - late);
}

// The tile that a warp fetches next.
struct Cursor {
    const u8* p;             // this lane's first bytes of it
    u32 left, rest, tiles;   // tiles that lie one after another from it on; the warp's others; rows of tiles left in the segment
    int segment;
};
__device__ __forceinline__ const u8* start_of(const Product& a, int s) { return s == 0 ? a.seg[0].w : s == 1 ? a.seg[1].w : s == 2 ? a.seg[2].w : a.seg[3].w; }
__device__ __forceinline__ u32 rows_of(const Product& a, int s) { return s == 0 ? a.seg[0].rows : s == 1 ? a.seg[1].rows : s == 2 ? a.seg[2].rows : a.seg[3].rows; }
__device__ __forceinline__ u32 tiles_of(const Product& a, int s) { return s == 0 ? a.seg[0].tiles : s == 1 ? a.seg[1].tiles : s == 2 ? a.seg[2].tiles : a.seg[3].tiles; }

// Sums of a row of tiles that a lane has: as products leave them, or, where they were spread, v[0][0] of row g + 8 * (t >> 1) and column
// t & 1.
struct Sums {
    float v[NT][4];
};
template <bool SPREAD>
__device__ __forceinline__ void write(const Product& a, u32 slice, u32 tile, bool starts, bool ends, const Sums& sums) {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
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
    base += a.slices > 1 ? slice * plane : starts ? 0 : plane;
    const bool alone = a.slices == 1 && starts && ends;
    const u32 row = (local * TEAM + (threadIdx.x >> 5) % TEAM) * 16 + g + (SPREAD ? 8 * (t >> 1) : 0), col = SPREAD ? t & 1 : 2 * t;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < (SPREAD ? 1 : 4); ++i) {
            const u32 r = row + 8 * (i >> 1), c = n * 8 + col + (i & 1);
            if (r >= rows || c >= (u32)a.n) continue;
            float* out = base + (u64)c * stride + r;
            *out = sums.v[n][i] * scale;
            if (alone) out[plane] = 0.0f;
        }
}

// Block `block` of a product. Shared: rings, partial sums, zeros, activations with their groups' sums, barriers (see Shape in product.rs).
template <int LAYOUT>
__device__ __forceinline__ void body(const Product& a, const u16* x, const u32 x_stride, const u32 block, const u32 slice) {
    constexpr bool tiled = COLUMNS > 2, wide = TEAM > 1;   // tiled: activations come as Activation::t
    constexpr int TEAMS = WARPS / TEAM;
    constexpr int STAGES = Kind<LAYOUT>::stages, PARTS = Kind<LAYOUT>::parts, PART_BYTES = Kind<LAYOUT>::part_bytes, SUM_BYTES = Kind<LAYOUT>::sum_bytes;
    constexpr bool spread = Kind<LAYOUT>::spread;
    const int warp = threadIdx.x >> 5, team = warp / TEAM, member = warp % TEAM, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float* sums_of = (float*)((u8*)shared_bytes + WARPS * STAGES * PART_BYTES);
    constexpr int PLACE = spread ? 32 : NT * 128;   // sums that a warp leaves for others
    u32* zeros = (u32*)(sums_of + WARPS * PLACE);   // 512 bytes
    u32* run = zeros + 128;               // first and number of the block's tiles, for the end: there are no registers to keep them
    u16* xs = (u16*)(run + 4);
    const u32 all = (a.cols + 255) / 256, most = (all + a.slices - 1) / a.slices, first = slice * most;
    const u32 blocks = first >= all ? 0 : (all - first < most ? all - first : most), parts = blocks * PARTS;
    const u32 x_row = tiled ? GROUP_ROW : most * 256 + 32, sum_row = tiled ? GROUP_ROW : most * (SUM_BYTES / 2) + 16;   // halves
    u16* sums = tiled ? xs + 256 : xs + COLUMNS * x_row;
    const u32 barriers = (u32)__cvta_generic_to_shared(xs) + most * COLUMNS * GROUP_ROW * 2;
    // This block's run of the list of tiles: whole rows of tiles where slices leave their own planes.
    const u32 whole = a.slices == 1 ? 1 : parts, list = a.slices == 1 ? (u32)a.tiles * parts : (u32)a.tiles;
    const u32 block_from = first_of(a, list, block) * whole, block_to = first_of(a, list, block + 1) * whole;
    const u32 share = block_to - block_from, from = block_from + share * team / TEAMS, to = block_from + share * (team + 1) / TEAMS;
    const u32 ring = (u32)__cvta_generic_to_shared((u8*)shared_bytes + warp * STAGES * PART_BYTES), ring_at = tiled ? keep(ring) : ring, piece = tiled ? keep(lane * 16) : lane * 16;
    Cursor c = {0, 0, to - from, 0, 0};
    const u64 row_bytes = (u64)all * tile_bytes(LAYOUT), gap = TEAM * row_bytes - (u64)blocks * tile_bytes(LAYOUT);
    // A warp without a row of tiles in a segment's last four reads another's instead, for nothing.
    auto beyond = [&](u32 local) {
        const u32 last = (rows_of(a, c.segment) - 1) / 16, mine = local * TEAM + member;
        return TEAM > 1 && mine > last ? mine - last : 0;
    };
    u32 tile = 0, done = 0;   // of the part that is multiplied next
    // Of a segment that is read whole all that is left lies one after another, else what is left of a row of tiles.
    auto reach = [&](u32 at) {
        const u32 here = (gap == 0 ? c.tiles * parts : parts) - at;
        c.left = here < c.rest ? here : c.rest;
        c.rest -= c.left;
    };
    if (from < to) {
        tile = from / parts;
        done = from - tile * parts;
        u32 local = tile;
        while (local >= tiles_of(a, c.segment)) local -= tiles_of(a, c.segment++);
        c.tiles = tiles_of(a, c.segment) - local;
        c.p = start_of(a, c.segment) + piece + (local * TEAM + member - beyond(local)) * row_bytes + (u64)first * tile_bytes(LAYOUT) + done * PART_BYTES;
        reach(done);
    }
    auto fetch_next = [&](u32 to) {
        fetch_at<LAYOUT>(to, c.p, piece);
        c.p += PART_BYTES;
        if (--c.left > 0 || c.rest == 0) return;
        c.p += gap;
        if (gap == 0 || --c.tiles == 0) {
            c.segment += 1;
            c.tiles = tiles_of(a, c.segment);
            c.p = start_of(a, c.segment) + piece + member * row_bytes + (u64)first * tile_bytes(LAYOUT);
        }
        if (TEAM > 1 && c.tiles == 1) c.p -= beyond(tiles_of(a, c.segment) - 1) * row_bytes;
        reach(0);
    };
    allow_next();
    if (tiled && BULK && threadIdx.x == 0) {
        for (u32 b = 0; b < blocks; ++b) open_barrier(barriers + b * 8);
        open_barriers();
    }
    // One tile a warp at a time: all at once, they would keep what the kernels ahead read and write waiting for as long as they take. Blocks that
    // start once those are done keep nobody waiting.
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (s > 0 && block >= (u32)a.late) arrived<0>();
        if (c.left > 0) fetch_next(ring_at + s * PART_BYTES + piece);
        commit();
    }
    if (threadIdx.x == 0) run[0] = block_from, run[1] = share;
    if (spread && threadIdx.x < 128) zeros[threadIdx.x] = 0;
    const u32 xs_at = (u32)__cvta_generic_to_shared(xs), turn = keep(tiled && BULK && blocks > 0 ? block % blocks : 0);
    if (tiled && BULK) __syncthreads();
    wait_previous();
    if (tiled && BULK) {
        // Columns by columns, from others on in each block; whoever multiplies waits for what he takes. All of them are waited for: a
        // block has a whole row of tiles.
        if (lane == 0)
            for (u32 k = warp; k < blocks; k += WARPS) {
                const u32 b = k + turn < blocks ? k + turn : k + turn - blocks;
                copy_bulk(xs_at + b * COLUMNS * GROUP_ROW * 2, x + (u64)(first + b) * GROUP_ROWS * GROUP_ROW, COLUMNS * GROUP_ROW * 2, barriers + b * 8);
            }
    } else {
        // 16 bytes at a time, to [half][step][t]; through registers, for copies would wait behind the ring's.
        constexpr int LOADS = COLUMNS <= 2 ? 10 : 8, ROW_CHUNKS = GROUP_ROW / 8;
        const u32 row_chunks = tiled ? COLUMNS * ROW_CHUNKS : blocks * 32, chunks = tiled ? blocks * row_chunks : COLUMNS * row_chunks;
        const u32 inverse = COLUMNS == 1 ? 0 : 0xffffffffu / row_chunks + 1;   // i * inverse / 2^32 is i / row_chunks for all i below chunks
#pragma unroll 1
        for (u32 base = 0; base < chunks; base += LOADS * THREADS) {
            uint4 v[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const u32 i = base + k * THREADS + threadIdx.x, part = __umulhi(i, inverse), from_half = first * 256 + (i - part * row_chunks) * 8;
                v[k] = make_uint4(0, 0, 0, 0);
                if (tiled && i < chunks) v[k] = *(const uint4*)(x + (u64)(first + part) * GROUP_ROWS * GROUP_ROW + (i - part * row_chunks) * 8);
                if (!tiled && i < chunks && from_half < (u32)a.cols) v[k] = *(const uint4*)(x + (u64)((int)part < a.n ? part : a.n - 1) * x_stride + from_half);
            }
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const u32 i = base + k * THREADS + threadIdx.x, col = __umulhi(i, inverse), ch = i - col * row_chunks;
                if (i < chunks) *(uint4*)(xs + (tiled ? i * 8 : col * x_row + (ch >> 5) * 256 + ((ch >> 4) & 1) * 128 + (ch & 3) * 32 + ((ch >> 2) & 3) * 8)) = v[k];
            }
        }
        __syncthreads();
    }
    if (!tiled && Kind<LAYOUT>::sums) {
        // Sums of groups: half rows of 128 are the eight columns of a product with ones, in whose row r the lanes t = r have them.
        constexpr int sets = Kind<LAYOUT>::group == 16 ? 2 : 1, across = COLUMNS < 8 ? COLUMNS : 8;
        const u32 halves = blocks * 2, ones = g == t ? 0x3c003c00 : 0;
        for (u32 unit = warp * (8 / across); unit < halves; unit += WARPS * (8 / across))
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const u32 mine = unit + g / across < halves ? unit + g / across : unit;
                const u32 at = xs_at + ((n * 8 + g % across) * x_row + mine * 128 + t * 8) * 2;
                float total[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    uint4 v = lds128(at + step * 64);
                    mma(total[step * sets / 4], ones, 0, ones, 0, v.x, v.y);
                    mma(total[step * sets / 4], ones, 0, ones, 0, v.z, v.w);
                }
#pragma unroll
                for (int i = 0; i < 2 * sets; ++i) {
                    const u32 of = 2 * t + i / sets, half = unit + of / across;
                    if (g >= 4 || half >= halves) continue;
                    // A lane reads what belongs to its two minima: groups in their order, or t and t + 4.
                    const u32 number = ((half & 1) * 4 + g) * sets + i % sets, place = sets == 2 || Kind<LAYOUT>::k_sums ? number : (number & 3) * 2 + (number >> 2);
                    u16* to = sums + (n * 8 + of % across) * sum_row + (half >> 1) * (SUM_BYTES / 2) + (place >> 1) * 4 + (place & 1);
                    const float value = total[i % sets][i / sets];
                    to[0] = float_to_half(value);
                    to[2] = float_to_half(value - half_to_float(to[0]));
                }
            }
        __syncthreads();
    }
    // Addresses of this lane in the activations, the sums and every tile; steps from tile to tile.
    const u32 zeros_at = (u32)__cvta_generic_to_shared(zeros), col = g & (COLUMNS - 1);
    u32 x_at = (u32)__cvta_generic_to_shared(xs + (wide ? 0 : col * x_row + t * 8)), x_step = tiled ? COLUMNS * GROUP_ROW * 2 : 512;
    u32 sums_at = (u32)__cvta_generic_to_shared(sums + col * sum_row + t * 4), sums_step = tiled ? x_step : SUM_BYTES;
    if (spread && (g >> 1 != t || (g & 1) >= COLUMNS)) x_at = zeros_at, x_step = 0;
    if (spread && g >= COLUMNS) sums_at = zeros_at, sums_step = 0;
    x_at = keep(x_at);
    sums_at = keep(sums_at);
    const Lane l = lane_of<LAYOUT>(lane, piece, a.masks);
    u32 unit = from, unseen = tiled && BULK ? parts : 0;   // tiles until all columns were waited for
    u32 slot = ring_at;
    constexpr int VALUES = spread ? 1 : 4;
    Sums sums_here{};
    auto place = [&](u32 of, int n, int i) -> float& { return sums_of[(of * TEAM + member) * PLACE + (n * 4 + i) * 32 + lane]; };
#pragma unroll 1
    while (unit < to) {
        const u32 begin = done, left = to - unit, end = parts - done < left ? parts : done + left;
        float acc[wide ? NT : 2 * NT][4] = {};
        unit += end - begin;
        auto one = [&]() {
            const u32 columns = done / PARTS * x_step, groups = done / PARTS * sums_step;
            arrived<STAGES - 1>();
            __syncwarp();
            // Reads of what has just arrived stay behind this.
            const u32 x_here = tiled ? keep(x_at + columns) : x_at + columns, groups_here = tiled ? keep(sums_at + groups) : sums_at + groups, tile_at = keep(slot);
            auto freed = [&]() {
                __syncwarp();
                if (c.left > 0) fetch_next(tile_at + piece);
                commit();
            };
            if constexpr (wide) {
                consume_wide<LAYOUT>(acc, tile_at, x_here, done % PARTS, l, freed);
            } else {
                const u32 x_of[2] = {x_here, x_here + 8 * GROUP_ROW * 2}, groups_of[2] = {groups_here, groups_here + 8 * GROUP_ROW * 2};
                consume<LAYOUT>(acc, tile_at, x_of, groups_of, done % PARTS, l, freed);
            }
            if constexpr (wide) wide_done();
            slot = slot + PART_BYTES == ring_at + STAGES * PART_BYTES ? ring_at : slot + PART_BYTES;
        };
        // Tiles whose activations are still on their way have a loop of their own where that pays for its text.
        if (wide && BULK)
#pragma unroll 1
            for (; unseen > 0 && done < end; --unseen, ++done) {
                wait_bulk(barriers + done / PARTS * 8);
                one();
            }
#pragma unroll 1
        for (; done < end; ++done) {
            if (tiled && !wide && BULK && unseen > 0) {
                wait_bulk(barriers + done / PARTS * 8);
                --unseen;
            }
            one();
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float v = wide ? acc[n][i] : spread ? acc[0][i] * Kind<LAYOUT>::unit + acc[1][i] : acc[2 * n][i] + acc[2 * n + 1][i];
                if (spread) {
                    v += __shfl_xor_sync(0xffffffffu, v, 1);
                    v += __shfl_xor_sync(0xffffffffu, v, 2);
                }
                if (!spread) sums_here.v[n][i] = v;
                else if (i == t) sums_here.v[0][0] = v;
            }
        if (begin > 0)   // what an earlier warp began is left for it
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < VALUES; ++i) place(team, n, i) = sums_here.v[n][i];
        if (begin == 0 && end == parts) write<spread>(a, slice, tile, true, true, sums_here);
        tile += 1;
        done = 0;
    }
    __syncthreads();
    if (from == to) return;
    // Who has the first part of a cut row of tiles adds the others', which stand one after another: here that which he ends with, and for the
    // block's first what another block began.
    auto join = [&](u32 cut, bool starts, Sums all) {
        const u32 row_end = (cut + 1) * parts;
        u32 at = to;
#pragma unroll 1
        for (u32 other = team + 1; other < TEAMS && at < row_end; ++other) {
            const u32 other_to = run[0] + run[1] * (other + 1) / TEAMS;
            if (other_to <= at) continue;
            at = other_to;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < VALUES; ++i) all.v[n][i] += place(other, n, i);
        }
        write<spread>(a, slice, cut, starts, at >= row_end, all);
    };
    const u32 begun = from / parts, left_open = to / parts;
    if (from == run[0] && from != begun * parts) {
        Sums mine;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) mine.v[n][i] = place(team, n, i);
        join(begun, false, mine);
    }
    if (to != left_open * parts && left_open * parts >= from) join(left_open, true, sums_here);
}

// grid: (blocks of both products, slices), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS, COLUMNS <= 2 ? 3 : 1) project(const Product a, const Product side, u32* ticket, const u16* x, const u32 x_stride) {
    u32 block = blockIdx.x, slice = blockIdx.y;
    if (COLUMNS > 2 && ticket) {
        // Blocks on multiprocessors that the kernel before still holds start late, and are given less: they are numbered as they start.
        u32* mine = (u32*)shared_bytes;
        if (threadIdx.x == 0) {
            *mine = atomicAdd(ticket, 1u);
            if (*mine + 1 == gridDim.x * gridDim.y) *ticket = 0;
            __threadfence();
        }
        __syncthreads();
        block = *mine / gridDim.y;
        slice = *mine - block * gridDim.y;
        block = gridDim.x - 1 - block;
        __syncthreads();
    }
#ifdef SIDE
    if (block >= (u32)a.blocks) return body<SIDE>(side, x, x_stride, block - a.blocks, slice);
#endif
    body<TYPE>(a, x, x_stride, block, slice);
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
        if (Kind<TYPE>::k_sums) {
            const u32 *h = (const u32*)(head + row * 16), of_minima = half * 2 + (t >> 1);
            u32 scales, minima, other;
            k_scales(h[0], h[k_word(t)], h[k_next(t)], k_shift(t), six_bits(m), scales, other);
            k_scales(h[0], h[k_word(of_minima)], h[k_next(of_minima)], k_shift(of_minima), six_bits(m), other, minima);
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
                nibbles5(words[i], high.x, i, scale, false, m, f);
            } else {
                nibbles(words[i], scale, false, TYPE, m, f);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) f[k] = hmul2(Kind<TYPE>::k_sums ? hadd2(f[k], minimum) : f[k], factor);
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
