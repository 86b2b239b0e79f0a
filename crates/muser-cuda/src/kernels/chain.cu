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
struct alignas(16) Run {
    u32 product, from, to;
    u32 tile, begun;         // the row of tiles that `from` stands in, and what of it stands before
    u32 piece, left, rest;   // tiles of `piece` that are not fetched yet, and those of pieces after it
    const u8* p;             // the next; as `take` gives it, a lane's 16 bytes of it
    u32 last, others;        // the row of tiles that `to` stands in, with flags; warps whose parts are joined to `tile`'s, and to `last`'s
};
// Flags of `last`: the row `tile`, which another block began, is this warp's to join, and this block ends it; the same of the row `last`.
enum { CUT_FIRST = 1u << 28, FIRST_ENDS = 1u << 29, CUT_LAST = 1u << 30, LAST_ENDS = 1u << 31 };

__device__ __forceinline__ Run open_share(const Chain& c, u32 step) {
    Run r;
    const u32 warp = threadIdx.x >> 5, first = c.product[2 * step].blocks;
    const bool second = blockIdx.x >= first;
    const u32 block = blockIdx.x - (second ? first : 0);
    r.product = 2 * step + second;
    const Product& a = c.product[r.product];
    const u32 block_from = block * a.share + (block < a.longer ? block : a.longer), run = block >= a.blocks ? 0 : a.share + (block < a.longer);
    r.from = block_from + run * warp / WARPS;
    r.to = block_from + run * (warp + 1) / WARPS;
    r.tile = r.begun = r.piece = r.left = r.rest = r.last = r.others = 0;
    r.p = 0;
    if (r.from == r.to) return r;
    const u32 parts = (a.cols + 255) / 256 * parts_of(a.layout);
    r.tile = r.from / parts;
    r.begun = r.from - r.tile * parts;
    u32 local = r.tile;
    while (local >= a.piece[r.piece].tiles) local -= a.piece[r.piece++].tiles;
    const u32 before = local * parts + r.begun, here = a.piece[r.piece].tiles * parts - before, all = r.to - r.from;
    r.left = here < all ? here : all;
    r.rest = all - r.left;
    r.p = a.piece[r.piece].w + (u64)before * (tile_bytes(a.layout) / parts_of(a.layout));
    // Parts of a row of tiles stand in warps one after another; the one that has the first of this block adds them up.
    auto join = [&](u32 row_end, u32 ends, u32 shift) {
        u32 at = r.to;
        for (u32 other = warp + 1; other < WARPS && at < row_end; ++other) {
            const u32 other_to = block_from + run * (other + 1) / WARPS;
            if (other_to <= at) continue;
            at = other_to;
            r.others |= 1u << (other + shift);
        }
        return at >= row_end ? ends : 0;
    };
    const u32 row = r.from - r.begun, open = r.to / parts * parts;
    r.last = r.to / parts;
    if (r.from == block_from && r.begun > 0) r.last |= CUT_FIRST | join(row + parts, FIRST_ENDS, 0);
    if (open < r.to && open >= r.from) r.last |= CUT_LAST | join(open + parts, LAST_ENDS, 16);
    return r;
}

// A lane's 16 bytes of a tile, and what is added to their address: copies reach 2 KB to both sides of it without arithmetic.
#define AHEAD 1536
__device__ __forceinline__ const u8* mine(const u8* tile) { return tile + (threadIdx.x & 31) * 16 + AHEAD; }

// A share from shared memory, to fetch from.
__device__ __forceinline__ Run take(const Run& share) {
    Run r = share;
    r.p = mine(r.p);
    return r;
}

// Goes on by n tiles of this piece, and then to the next, if none of this is left.
__device__ __forceinline__ void advance(const Chain& c, Run& r, u32 n, u32 parts) {
    r.left -= n;
    if (r.left > 0 || r.rest == 0) return;
    const Piece& next = c.product[r.product].piece[++r.piece];
    const u32 here = next.tiles * parts;
    r.left = here < r.rest ? here : r.rest;
    r.rest -= r.left;
    r.p = mine(next.w);
}

// A lane's part of a tile to a place of the ring.
template <int LAYOUT>
__device__ __forceinline__ void copy_tile(u32 to, const u8* p) {
    constexpr int bytes = Slots<LAYOUT>::bytes, whole = bytes / 512 * 512;
    if (whole < bytes) copy16_if((threadIdx.x & 31) * 16 < bytes - whole, to + whole, p + whole - AHEAD);
#pragma unroll
    for (int o = 0; o < whole; o += 512) copy16(to + o, p + o - AHEAD);
}

// One stage of the ring's places.
template <int LAYOUT, int STAGE>
__device__ __forceinline__ void fill_places(const Chain& c, Run& r, u32 ring_at) {
    constexpr int from = Slots<LAYOUT>::from[STAGE], n = Slots<LAYOUT>::from[STAGE + 1] - from, bytes = Slots<LAYOUT>::bytes;
    const u32 parts = (c.product[r.product].cols + 255) / 256 * Kind<LAYOUT>::parts;
    // They stand one after another, but for those at a piece's end.
    if (n > 1 && r.left >= n) {
#pragma unroll
        for (int s = 0; s < n; ++s) {
            copy_tile<LAYOUT>(ring_at + (from + s) * bytes, r.p + s * bytes);
            commit();
        }
        r.p += n * bytes;
        return advance(c, r, n, parts);
    }
#pragma unroll 1
    for (int s = 0; s < n; ++s) {
        if (r.left > 0) {
            copy_tile<LAYOUT>(ring_at + (from + s) * bytes, r.p);
            r.p += bytes;
            advance(c, r, 1, parts);
        }
        commit();
    }
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

// Sums of groups of activations as high and low halves, where the lanes of project.cu's sums expect them: up to eight half rows of 128,
// which this warp wrote, are the columns of a product with ones, in whose row r the lanes t = r have them.
template <int LAYOUT, typename Of>
__device__ __forceinline__ void sum_groups(u32 xs_at, u16* sums, u32 halves, const Of& half_of) {
    if (!Kind<LAYOUT>::sums || half_of(0) >= halves) return;
    constexpr int sets = Kind<LAYOUT>::group == 16 ? 2 : 1;
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, ones = g == t ? 0x3c003c00 : 0, mine = half_of(g);
    __syncwarp();
    const u32 at = keep(xs_at + ((mine < halves ? mine : half_of(0)) * 128 + t * 8) * 2);
    float total[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const uint4 v = lds128(at + step * 64);
        mma(total[step * sets / 4], ones, 0, ones, 0, v.x, v.y);
        mma(total[step * sets / 4], ones, 0, ones, 0, v.z, v.w);
    }
#pragma unroll
    for (int i = 0; i < 2 * sets; ++i) {
        const u32 half = half_of(2 * t + i / sets);
        if (g >= 4 || half >= halves) continue;
        const u32 number = ((half & 1) * 4 + g) * sets + i % sets, to = sets == 2 || Kind<LAYOUT>::k_sums ? number : (number & 3) * 2 + (number >> 2);
        u16* pair = sums + (half >> 1) * (Kind<LAYOUT>::sum_bytes / 2) + (to >> 1) * 4 + (to & 1);
        const float value = total[i % sets][i / sets];
        pair[0] = float_to_half(value);
        pair[2] = float_to_half(value - half_to_float(pair[0]));
    }
}
template <typename Of>
__device__ __forceinline__ void keep_sums(u32 layout, u32 xs_at, u16* sums, u32 halves, const Of& half_of) {
    if (layout == FIRST) sum_groups<FIRST>(xs_at, sums, halves, half_of);
#ifdef SECOND
    else sum_groups<SECOND>(xs_at, sums, halves, half_of);
#endif
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
    u32 tile = r.tile, done = r.begun, unit = r.from, at = ring_at;
#pragma unroll 1
    while (unit < r.to) {
        const u32 begin = done, left = r.to - unit, end = parts - done < left ? parts : done + left;
        float acc[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        unit += end - begin;
        while (done < end) {
            const u32 more = r.left, n = more > 0 && more < end - done ? more : end - done;
#pragma unroll 1
            for (const u32 stop = done + n; done < stop; ++done) {
                const u32 x[1] = {x_at + done / PARTS * x_step}, of_groups[1] = {sums_at + done / PARTS * sums_step};
                arrived<PLACES - 1>();
                __syncwarp();
                consume<LAYOUT>(acc, keep(at - lane * 16), x, of_groups, done % PARTS, l);
                __syncwarp();
                if (more) copy_tile<LAYOUT>(at, r.p);
                commit();
                r.p += BYTES;
                at = at + BYTES == ring_at + PLACES * BYTES ? ring_at : at + BYTES;
            }
            if (more) advance(c, r, n, parts);
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

// Rows of tiles that were cut between warps.
__device__ __forceinline__ void join_cuts(const Chain& c, const Run& r, const float* sums_of) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 15;
    auto join = [&](u32 tile, u32 from_place, u32 others, bool ends) {
        float v = sums_of[from_place * 16 + lane];
#pragma unroll 1
        for (u32 other = warp + 1; others >> other; ++other)
            if (others >> other & 1) v += sums_of[2 * other * 16 + lane];
        put(c, r.product, tile, (from_place & 1) != 0, ends, v);
    };
    const u32 last = r.last, others = r.others;
    if (last & CUT_FIRST) join(r.tile, 2 * warp, others & 0xffff, last & FIRST_ENDS);
    if (last & CUT_LAST) join(last & (CUT_FIRST - 1), 2 * warp + 1, others >> 16, last & LAST_ENDS);
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
// Four sums over a block; `partial` has room for each warp's. A lane soon goes on with one of the four alone.
__device__ __forceinline__ float4 sum_all(float4 v, float* partial) {
    const u32 lane = threadIdx.x & 31, odd = lane & 1, upper = lane & 2;
    auto across = [](float w, int d) { return __shfl_xor_sync(0xffffffffu, w, d); };
    const float a = (odd ? v.y : v.x) + across(odd ? v.x : v.y, 1), b = (odd ? v.w : v.z) + across(odd ? v.z : v.w, 1);
    float sum = (upper ? b : a) + across(upper ? a : b, 2);
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum += across(sum, d);
    if (lane < 4) partial[(threadIdx.x >> 5) * 4 + lane] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS * 4; i += 32) sum += partial[i + lane];
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum += across(sum, d);
    auto from = [&](int l) { return __shfl_sync(0xffffffffu, sum, l); };
    return make_float4(from(0), from(1), from(2), from(3));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chain(const __grid_constant__ Chain c) {
    const u32 warp = threadIdx.x >> 5;
    float* const sums_of = (float*)((u8*)shared_bytes + WARPS * RING);
    u32* const zeros = (u32*)(sums_of + 2 * WARPS * 16);   // 512 bytes
    float* const partial = (float*)(zeros + 128);          // four of each warp
    Run* const runs = (Run*)(partial + 4 * WARPS) + warp * STEPS;
    u16* const xs = (u16*)(partial + 4 * WARPS + WARPS * STEPS * (sizeof(Run) / 4));
    u16* const sums = xs + c.xs_halves;
    const u32 ring_at = (u32)__cvta_generic_to_shared((u8*)shared_bytes + warp * RING + (threadIdx.x & 31) * 16), xs_at = (u32)__cvta_generic_to_shared(xs), zeros_at = (u32)__cvta_generic_to_shared(zeros);
    allow_next();
    // The shares of all steps, each by a lane.
    if ((threadIdx.x & 31) < STEPS) runs[threadIdx.x & 31] = open_share(c, threadIdx.x & 31);
    __syncwarp();
    Run r = take(runs[0]);
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
                }
                const u32 first = base / 16 + warp * 2;
                keep_sums(layout, xs_at, sums, chunks / 16, [&](u32 column) { return first + (column >> 1) * (THREADS / 16) + (column & 1); });
                keep_sums(layout, xs_at, sums, chunks / 16, [&](u32 column) { return column < 2 ? first + 4 * (THREADS / 16) + column : ~0u; });
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
                sum.w += dot4(x[i], x[i]);
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
                sum.y += dot4(v[i], v[i]);
                sum.z += dot4(v[i], x[i]);
            }
            fill<2>(c, r, ring_at);   // not before: what planes bring would wait behind it
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
                if (e < first || e >= last || e >= cols) continue;
                *(float4*)(t.after + e) = v[i];
                if (features) *(float4*)(features + e) = v[i];
            }
            keep_sums(layout, xs_at, sums, chunks / 16, [&](u32 column) { return column < FOURS ? column * WARPS + warp : ~0u; });
        }
        __syncthreads();
        if (layout == FIRST) multiply_share<FIRST>(c, r, ring_at, sums_of, zeros_at, xs_at, sums);
#ifdef SECOND
        else multiply_share<SECOND>(c, r, ring_at, sums_of, zeros_at, xs_at, sums);
#endif
        if (step + 1 < STEPS) r = take(runs[step + 1]), fill<0>(c, r, ring_at);
        __syncthreads();
        join_cuts(c, runs[step], sums_of);
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
