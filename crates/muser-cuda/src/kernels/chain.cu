// One layer of one activation row in one launch, from attention's output to the next layer's queries, keys, values and gate (or to
// the head): four products with the norms, the residual and SiLU between them.
// Layout: one block a multiprocessor, all on the card at once, since they wait for each other between products. A product's list of
// tiles is shared out as in project.cu; each block then makes the whole next activation for itself from the planes that all left.
// A ring's first tiles of the next product are on their way while blocks wait, by and by.
// Bytes: the weights, once. Operations: 2 a weight. Memory binds; what waits for it to be idle are four barriers of the grid.
#define WARPS 16
#define THREADS (WARPS * 32)
#define RING 10240

// Mirrors of the structs in chain.rs.
struct Piece {
    const u8* w;
    float* out;
    u64 plane;       // elements from plane to plane of out
    u32 rows, tiles;
    float scale;
    u32 pad;
};
struct Product {
    Piece piece[4];
    u32 cols, layout, blocks;   // blocks may be none
    u32 share, longer;          // tiles of a block; the first `longer` have one more
    u32 pad;
};
struct Tail {
    const float *post, *next, *before;   // post may be null; the residual before
    float *after, *features;             // and after; features may be null
    float post_eps, eps;
};
struct Chain {
    Product product[8];   // two a step: the second has its own layout, or no blocks
    Tail tail[2];
    const u16* attended;
    u16* f;
    const Row* rows;
    u32* arrived;         // counters of this launch, which the step's first kernel clears
    u32 feature_stride, xs_halves;
    u32 kept, activated;  // elements of the residual that a block writes; of SiLU that it computes
    Masks masks;
};
#define STEPS 4
#ifdef SECOND
#define OF(layout, what) ((layout) == FIRST ? Kind<FIRST>::what : Kind<SECOND>::what)
#else
#define OF(layout, what) Kind<FIRST>::what
#endif

extern __shared__ uint4 shared_bytes[];

// Places of a warp's ring. They are filled in stages: the first as soon as a product's list is done, those up to `early` once this block
// has told the others, the rest when all have: more at once would hold up what blocks tell each other.
template <int LAYOUT>
struct Slots {
    static constexpr int bytes = Kind<LAYOUT>::part_bytes, count = RING / bytes > 4 ? 4 : RING / bytes, early = count > 2 ? 2 : 1;
    static constexpr int from[4] = {0, 1, early, count};
};
__device__ __forceinline__ u32 parts_of(u32 layout) { return layout == F16 ? 4 : 1; }

// A warp's share of a product's tiles, and the tile that it fetches next.
struct Run {
    u32 product, block_from, run;   // which product, and the whole block's share of it
    u32 from, to, next;
    u32 tile, begun;                // the row of tiles that `from` stands in, and what of it stands before
    const u8* p;
    u32 left, piece;                // tiles of `piece` that are not fetched yet
};

__device__ __forceinline__ Run open_share(const Chain& c, u32 step) {
    Run r;
    const u32 warp = threadIdx.x >> 5, first = c.product[2 * step].blocks;
    const bool second = blockIdx.x >= first;
    const u32 block = blockIdx.x - (second ? first : 0);
    r.product = 2 * step + second;
    const Product& a = c.product[r.product];
    r.block_from = block * a.share + (block < a.longer ? block : a.longer);
    r.run = block >= a.blocks ? 0 : a.share + (block < a.longer);
    r.from = r.next = r.block_from + r.run * warp / WARPS;
    r.to = r.block_from + r.run * (warp + 1) / WARPS;
    r.tile = r.begun = r.left = r.piece = 0;
    r.p = 0;
    if (r.from == r.to) return r;
    const u32 parts = (a.cols + 255) / 256 * parts_of(a.layout);
    r.tile = r.from / parts;
    r.begun = r.from - r.tile * parts;
    u32 local = r.tile;
    while (local >= a.piece[r.piece].tiles) local -= a.piece[r.piece++].tiles;
    const u32 before = local * parts + r.begun;
    r.left = a.piece[r.piece].tiles * parts - before;
    r.p = a.piece[r.piece].w + (u64)before * (tile_bytes(a.layout) / parts_of(a.layout));
    return r;
}

// Goes on by n tiles, of which the last may be its piece's last.
__device__ __forceinline__ void advance(const Chain& c, Run& r, u32 n, u32 parts, u32 bytes) {
    r.next += n;
    r.p += n * bytes;
    r.left -= n;
    if (r.left == 0 && r.next < r.to) {
        r.piece += 1;
        r.left = c.product[r.product].piece[r.piece].tiles * parts;
        r.p = c.product[r.product].piece[r.piece].w;
    }
}

// Fetches the next tile to a place of the ring; one group of copies, also where there is none.
template <int LAYOUT>
__device__ __forceinline__ void fetch_next(const Chain& c, Run& r, u32 parts, u32 to) {
    if (r.next < r.to) {
        fetch<LAYOUT>(to, r.p, threadIdx.x & 31);
        advance(c, r, 1, parts, Slots<LAYOUT>::bytes);
    }
    commit();
}

// One stage of the ring's places.
template <int LAYOUT, int STAGE>
__device__ __forceinline__ void fill_places(const Chain& c, Run& r, u32 ring_at) {
    constexpr int from = Slots<LAYOUT>::from[STAGE], n = Slots<LAYOUT>::from[STAGE + 1] - from, bytes = Slots<LAYOUT>::bytes;
    const u32 parts = (c.product[r.product].cols + 255) / 256 * Kind<LAYOUT>::parts;
    if (n > 1 && r.next + n <= r.to && r.left >= n) {
        // They stand one after another.
#pragma unroll
        for (int s = 0; s < n; ++s) {
            fetch<LAYOUT>(ring_at + (from + s) * bytes, r.p + s * bytes, threadIdx.x & 31);
            commit();
        }
        advance(c, r, n, parts, bytes);
        return;
    }
#pragma unroll 1
    for (int s = 0; s < n; ++s) fetch_next<LAYOUT>(c, r, parts, ring_at + (from + s) * bytes);
}
template <int STAGE>
__device__ __forceinline__ void fill(const Chain& c, Run& r, u32 ring_at) {
    const u32 layout = c.product[r.product].layout;
    if (layout == FIRST) fill_places<FIRST, STAGE>(c, r, ring_at);
#ifdef SECOND
    else fill_places<SECOND, STAGE>(c, r, ring_at);
#endif
}

// Where 8 halves, the chunk-th of a row, stand in shared memory: [256 columns][half][step][t].
__device__ __forceinline__ u32 place(u32 chunk) { return (chunk >> 5) * 256 + ((chunk >> 4) & 1) * 128 + (chunk & 3) * 32 + ((chunk >> 2) & 3) * 8; }

// Keeps the sums of groups of activations, of which a lane has N from element e on: high and low halves, where the lanes of project.cu's
// sums expect them.
template <int N>
__device__ __forceinline__ void keep_sums(u32 layout, u16* sums, u32 e, const u32* pairs) {
    if (!OF(layout, sums)) return;
    const u32 group = OF(layout, group);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum += half_to_float((u16)pairs[i]) + half_to_float((u16)(pairs[i] >> 16));
#pragma unroll
    for (u32 d = 1; d < 16 / N; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (group == 32) sum += __shfl_xor_sync(0xffffffffu, sum, 16 / N);
    if (threadIdx.x & (group / N - 1)) return;
    const u32 number = (e & 255) / group, to = group == 16 || OF(layout, k_sums) ? number : (number & 3) * 2 + (number >> 2);
    u16* pair = sums + (e >> 8) * (OF(layout, sum_bytes) / 2) + (to >> 1) * 4 + (to & 1);
    pair[0] = float_to_half(sum);
    pair[2] = float_to_half(sum - half_to_float(pair[0]));
}

// A row of tiles, lane i holding row i of 16, to its planes.
__device__ __forceinline__ void put(const Chain& c, u32 product, u32 tile, bool starts, bool ends, float v) {
    const u32 lane = threadIdx.x & 31;
    u32 piece = 0;
    while (tile >= c.product[product].piece[piece].tiles) tile -= c.product[product].piece[piece++].tiles;
    const Piece& to = c.product[product].piece[piece];
    const u32 row = tile * 16 + lane;
    if (lane >= 16 || row >= to.rows) return;
    to.out[(starts ? 0 : to.plane) + row] = v * to.scale;
    if (starts && ends) to.out[to.plane + row] = 0.0f;
}

// This block's share of a product. Activations are in shared memory, the first places of the ring are filled or on their way.
template <int LAYOUT>
__device__ __forceinline__ void multiply_share(const Chain& c, Run& r, u32 ring_at, float* sums_of, u32 zeros_at, u32 xs_at, u16* sums) {
    constexpr int PLACES = Slots<LAYOUT>::count, BYTES = Slots<LAYOUT>::bytes, PARTS = Kind<LAYOUT>::parts, SUM_BYTES = Kind<LAYOUT>::sum_bytes;
    constexpr bool spread = Kind<LAYOUT>::spread;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 blocks = (c.product[r.product].cols + 255) / 256, parts = blocks * PARTS;
    // Addresses of this lane in the activations, the sums and every tile; steps from tile to tile.
    u32 x_at = xs_at + t * 16, sums_at = (u32)__cvta_generic_to_shared(sums + t * 4), x_step = 512, sums_step = SUM_BYTES;
    if (spread && (g >> 1 != t || (g & 1))) x_at = zeros_at, x_step = 0;
    if (spread && g) sums_at = zeros_at, sums_step = 0;
    x_at = keep(x_at);
    sums_at = keep(sums_at);
    const u32 head = head_at(LAYOUT);
    constexpr bool grouped = Kind<LAYOUT>::k_sums;
    const Lane l = {keep(lane * 16), keep(grouped ? head + g * 16 : head + lane * 8), keep(grouped ? head + g * 16 + k_word(t) * 4 : Q6K_D + g * 2),
                    keep(head + g * 16 + k_next(t) * 4), keep(k_shift(t)), c.masks, keep(six_bits(c.masks))};
    u32 tile = r.tile, done = r.begun, unit = r.from;
    int slot = 0;
#pragma unroll 1
    while (unit < r.to) {
        const u32 begin = done, left = r.to - unit, end = parts - done < left ? parts : done + left;
        float acc[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        unit += end - begin;
#pragma unroll 1
        for (; done < end; ++done) {
            const u32 x[1] = {x_at + done / PARTS * x_step}, of_groups[1] = {sums_at + done / PARTS * sums_step};
            arrived<PLACES - 1>();
            __syncwarp();
            consume<LAYOUT>(acc, keep(ring_at + slot * BYTES), x, of_groups, done % PARTS, l);
            __syncwarp();
            fetch_next<LAYOUT>(c, r, parts, ring_at + slot * BYTES);
            slot = slot + 1 == PLACES ? 0 : slot + 1;
        }
        float* mine = sums_of + (2 * warp + (begin == 0)) * 16;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            float v = spread ? acc[0][i] * Kind<LAYOUT>::unit + acc[1][i] : acc[0][i] + acc[1][i];
            if (spread) {
                v += __shfl_xor_sync(0xffffffffu, v, 1);
                v += __shfl_xor_sync(0xffffffffu, v, 2);
            }
            if (t == 0) mine[g + 8 * (i >> 1)] = v;
        }
        __syncwarp();
        if (begin == 0 && end == parts) put(c, r.product, tile, true, true, lane < 16 ? mine[lane] : 0.0f);
        __syncwarp();
        tile += 1;
        done = 0;
    }
}

// Rows of tiles that were cut between warps: the warp that has the first part adds the others', which stand one after another.
__device__ __forceinline__ void join_cuts(const Chain& c, const Run& r, const float* sums_of) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (r.from == r.to) return;
    const Product& a = c.product[r.product];
    const u32 parts = (a.cols + 255) / 256 * parts_of(a.layout);
    auto join = [&](u32 cut, u32 from_place, u32 at, u32 row_end) {
        float v = lane < 16 ? sums_of[from_place * 16 + lane] : 0.0f;
#pragma unroll 1
        for (u32 other = warp + 1; other < WARPS && at < row_end; ++other) {
            const u32 other_to = r.block_from + r.run * (other + 1) / WARPS;
            if (other_to <= at) continue;
            at = other_to;
            if (lane < 16) v += sums_of[2 * other * 16 + lane];
        }
        put(c, r.product, cut, (from_place & 1) != 0, at >= row_end, v);
    };
    // The first row of tiles, where another block began it; the last, where this warp began it and does not end it.
    const u32 row = r.from - r.begun, rows = (r.to - row) / parts, open = row + rows * parts;
    if (r.from == r.block_from && r.begun > 0) join(r.tile, 2 * warp, r.to, row + parts);
    if (open < r.to && open >= r.from) join(r.tile + rows, 2 * warp + 1, r.to, open + parts);
}

// A barrier of the grid in two halves: what a block wrote before the first is seen by all after the second.
__device__ __forceinline__ void arrive(u32* counter) {
    __syncthreads();
    if (threadIdx.x == 0) count_up(counter);
}
__device__ __forceinline__ void wait_all(const u32* counter) {
    if (threadIdx.x == 0)
        while (load_count(counter) < gridDim.x) stand_by();
    __syncthreads();
}

#define FOURS ((8192 / 4 + THREADS - 1) / THREADS)
// Sums over a block; `partial` has room for each warp's.
__device__ __forceinline__ float4 sum_all(float4 v, float4* partial) {
    const u32 lane = threadIdx.x & 31;
    v = make_float4(warp_sum(v.x), warp_sum(v.y), warp_sum(v.z), warp_sum(v.w));
    if (lane == 0) partial[threadIdx.x >> 5] = v;
    __syncthreads();
    v = partial[lane % WARPS];
#pragma unroll
    for (int d = WARPS / 2; d > 0; d >>= 1)
        v = add4(v, make_float4(__shfl_xor_sync(0xffffffffu, v.x, d), __shfl_xor_sync(0xffffffffu, v.y, d), __shfl_xor_sync(0xffffffffu, v.z, d), __shfl_xor_sync(0xffffffffu, v.w, d)));
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chain(const __grid_constant__ Chain c) {
    const u32 warp = threadIdx.x >> 5;
    float* const sums_of = (float*)((u8*)shared_bytes + WARPS * RING);
    u32* const zeros = (u32*)(sums_of + 2 * WARPS * 16);   // 512 bytes
    float4* const partial = (float4*)(zeros + 128);        // of each warp
    u16* const xs = (u16*)(partial + WARPS);
    u16* const sums = xs + c.xs_halves;
    const u32 ring_at = (u32)__cvta_generic_to_shared((u8*)shared_bytes + warp * RING), xs_at = (u32)__cvta_generic_to_shared(xs), zeros_at = (u32)__cvta_generic_to_shared(zeros);
    allow_next();
    Run r = open_share(c, 0);
    // Attention, too, would be held up.
    fill<0>(c, r, ring_at);
    arrived<0>();
    fill<1>(c, r, ring_at);
    arrived<0>();
    fill<2>(c, r, ring_at);
    if (threadIdx.x < 128) zeros[threadIdx.x] = 0;
    wait_previous();
#pragma unroll 1
    for (u32 step = 0; step < STEPS; ++step) {
        const u32 cols = c.product[r.product].cols, chunks = (cols + 255) / 256 * 32, layout = c.product[r.product].layout;
        if (step == 0 || step == 2) {
            // f16 activations as they are.
            const u16* from = step == 0 ? c.attended : c.f;
#pragma unroll 1
            for (u32 base = 0; base < chunks; base += 5 * THREADS) {
                uint4 v[5];
#pragma unroll
                for (int k = 0; k < 5; ++k) {
                    const u32 i = base + k * THREADS + threadIdx.x;
                    v[k] = i * 8 < cols ? load_far(from + i * 8) : make_uint4(0, 0, 0, 0);
                }
                if (base == 0 && step > 0) fill<2>(c, r, ring_at);
#pragma unroll
                for (int k = 0; k < 5; ++k) {
                    const u32 i = base + k * THREADS + threadIdx.x;
                    if (i >= chunks) continue;   // whole warps
                    *(uint4*)(xs + place(i)) = v[k];
                    keep_sums<8>(layout, sums, i * 8, (const u32*)&v[k]);
                }
            }
        } else {
            const Tail& t = c.tail[step >> 1];
            const Piece& p = c.product[2 * step - 2].piece[0];
            float4 post[FOURS], next[FOURS], x[FOURS], v[FOURS], more[FOURS];
            const float4 none = make_float4(0, 0, 0, 0), ones = make_float4(1, 1, 1, 1);
            float* features = t.features ? t.features + (u64)c.rows[0].feature * c.feature_stride : 0;
            float4 sum = none;   // of squares: of what is added, of it after its norm's weights, twice their product with the residual, of the residual
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                const u32 e = (i * THREADS + threadIdx.x) * 4;
                post[i] = t.post && e < cols ? *(const float4*)(t.post + e) : ones;
                next[i] = e < cols ? *(const float4*)(t.next + e) : none;
                x[i] = e < cols ? floats(load_far(t.before + e)) : none;
            }
            wait_all(c.arrived + (step == 1 ? 0 : 3));
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                const u32 e = (i * THREADS + threadIdx.x) * 4;
                v[i] = e < cols ? floats(load_far(p.out + e)) : none;
                more[i] = e < cols ? floats(load_far(p.out + p.plane + e)) : none;
            }
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                v[i] = add4(v[i], more[i]);
                sum.x += dot4(v[i], v[i]);
                v[i] = mul4(v[i], post[i]);
                sum = make_float4(sum.x, sum.y + dot4(v[i], v[i]), sum.z + dot4(v[i], x[i]), sum.w + dot4(x[i], x[i]));
            }
            fill<2>(c, r, ring_at);
            sum = sum_all(sum, partial);
            const float f = t.post ? rsqrtf(sum.x / (float)cols + t.post_eps) : 1.0f;
            const float squares = fmaxf(f * f * sum.y + 2.0f * f * sum.z + sum.w, 0.0f), g = rsqrtf(squares / (float)cols + t.eps);
            const u32 first = blockIdx.x * c.kept, last = first + c.kept;   // every block keeps its part of the residual
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                const u32 e = (i * THREADS + threadIdx.x) * 4;
                v[i] = add4(scale4(v[i], f), x[i]);
                const float4 h = mul4(scale4(v[i], g), next[i]);
                const u32 pairs[2] = {floats_to_half2(h.x, h.y), floats_to_half2(h.z, h.w)};
                if (e >= chunks * 8) continue;   // whole warps
                *(uint2*)(xs + place(e >> 3) + (e & 4)) = make_uint2(pairs[0], pairs[1]);
                keep_sums<4>(layout, sums, e, pairs);
                if (e < first || e >= last || e >= cols) continue;
                *(float4*)(t.after + e) = v[i];
                if (features) *(float4*)(features + e) = v[i];
            }
        }
        __syncthreads();
        if (layout == FIRST) multiply_share<FIRST>(c, r, ring_at, sums_of, zeros_at, xs_at, sums);
#ifdef SECOND
        else multiply_share<SECOND>(c, r, ring_at, sums_of, zeros_at, xs_at, sums);
#endif
        const Run done = r;
        if (step + 1 < STEPS) r = open_share(c, step + 1), fill<0>(c, r, ring_at);
        __syncthreads();
        join_cuts(c, done, sums_of);
        if (step + 1 == STEPS) break;
        // The tail waits where it has what it needs besides.
        arrive(c.arrived + (step == 2 ? 3 : step));
        arrived<0>();
        fill<1>(c, r, ring_at);
        if (step != 1) continue;
        wait_all(c.arrived + 1);
        const Product& a = c.product[2];
        const float *gate = a.piece[0].out, *up = a.piece[1].out;
        const u64 gate_plane = a.piece[0].plane, up_plane = a.piece[1].plane;
        const u32 first = blockIdx.x * c.activated, end = first + c.activated, last = end < a.piece[0].rows ? end : a.piece[0].rows;
        for (u32 i = first + threadIdx.x * 4; i < last; i += THREADS * 4) {
            const float4 g0 = floats(load_far(gate + i)), g1 = floats(load_far(gate + gate_plane + i));
            const float4 u0 = floats(load_far(up + i)), u1 = floats(load_far(up + up_plane + i));
            const float4 x = add4(g0, g1), y = add4(u0, u1);
            *(uint2*)(c.f + i) = make_uint2(floats_to_half2(x.x / (1.0f + __expf(-x.x)) * y.x, x.y / (1.0f + __expf(-x.y)) * y.y),
                                            floats_to_half2(x.z / (1.0f + __expf(-x.z)) * y.z, x.w / (1.0f + __expf(-x.w)) * y.w));
        }
        arrive(c.arrived + 2);
        wait_all(c.arrived + 2);
    }
}
