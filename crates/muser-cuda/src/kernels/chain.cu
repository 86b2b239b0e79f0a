// One layer of one or two activation rows (COLUMNS) in one launch, from attention's output to the next layer's queries, keys, values and gate (or to
// the head): four products with the norms, the residual and SiLU between them.
// Layout: one block a multiprocessor, all on the card at once, since they wait for each other between products. A product's list of
// tiles is shared out as in project.cu; each block then makes the whole next activation for itself from the planes that all left.
// A ring's first tiles of the next product are on their way while blocks wait, by and by.
// Bytes: the weights, once. Operations: 2 a weight. Memory binds; what waits for it to be idle are four barriers of the grid.

// Where 8 halves, the chunk-th of a row, stand in shared memory: [256 columns][half][step][t].
__device__ __forceinline__ u32 place(u32 chunk) { return (chunk >> 5) * 256 + ((chunk >> 4) & 1) * 128 + (chunk & 3) * 32 + ((chunk >> 2) & 3) * 8; }

// Pieces of 8 halves of a row of activations; halves from a row in shared memory to the next, and from a row of sums: what is left over lets rows meet other banks.
__device__ __forceinline__ u32 chunks_of(u32 cols) { return (cols + 255) / 256 * 32; }
__device__ __forceinline__ u32 x_row_of(u32 cols) { return (cols + 255) / 256 * 256 + (COLUMNS > 1 ? 32 : 0); }
__device__ __forceinline__ u32 sum_row_of(u32 cols) { return (cols + 255) / 256 * 32 + (COLUMNS > 1 ? 16 : 0); }

// Sums of groups of activations as high and low halves, where the lanes of tile.cuh expect them. The half rows of 128 that this warp wrote are,
// eight at a time, the columns of a product with ones, in whose row r the lanes t = r have them. `half_of`: the i-th of a row, of `count`.
template <int LAYOUT, typename Of>
__device__ __forceinline__ void sum_groups(u32 xs_at, u16* sums, u32 cols, u32 count, const Of& half_of) {
    if (!Kind<LAYOUT>::sums) return;
    constexpr int sets = Kind<LAYOUT>::group == 16 ? 2 : 1;
    const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, ones = g == t ? 0x3c003c00 : 0, halves = (cols + 255) / 256 * 2;
    __syncwarp();
#pragma unroll 1
    for (u32 first = 0; first < COLUMNS * count; first += 8) {
        // Row and half row of a column, if there is one.
        auto find = [&](u32 i, u32& row, u32& half) {
            row = COLUMNS > 1 && i >= count;
            half = half_of(i - row * count);
            return i < COLUMNS * count && half < halves;
        };
        u32 row, half;
        const bool mine = find(first + g, row, half);
        const u32 at = keep(xs_at + ((mine ? row * x_row_of(cols) + half * 128 : 0) + t * 8) * 2);
        // A sum of its own for each step, so that products do not wait for each other.
        float total[4][4] = {};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint4 v = lds128(at + step * 64);
            mma(total[step], ones, 0, ones, 0, v.x, v.y);
            mma(total[step], ones, 0, ones, 0, v.z, v.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            total[0][i] += total[1][i];
            total[2][i] += total[3][i];
            if (sets == 1) total[0][i] += total[2][i];
        }
#pragma unroll
        for (int i = 0; i < 2 * sets; ++i) {
            if (!find(first + 2 * t + i / sets, row, half) || g >= 4) continue;
            const u32 number = ((half & 1) * 4 + g) * sets + i % sets, to = sets == 2 || Kind<LAYOUT>::k_sums ? number : (number & 3) * 2 + (number >> 2);
            u16* pair = sums + row * sum_row_of(cols) + (half >> 1) * (Kind<LAYOUT>::sum_bytes / 2) + (to >> 1) * 4 + (to & 1);
            const float value = total[i % sets * 2][i / sets];
            pair[0] = float_to_half(value);
            pair[2] = float_to_half(value - half_to_float(pair[0]));
        }
    }
}

// A row of tiles, lane i holding row i % 16 of activation row i / 16, to its planes.
__device__ __forceinline__ void put(const Chain& c, u32 product, u32 tile, bool starts, bool ends, float v) {
    const u32 lane = threadIdx.x & 31;
    u32 piece = 0;
    while (tile >= c.product[product].piece[piece].tiles) tile -= c.product[product].piece[piece++].tiles;
    const Piece& to = c.product[product].piece[piece];
    const u32 row = tile * 16 + lane % 16;
    if (lane >= 16 * COLUMNS || row >= to.rows) return;
    float* const out = to.out + lane / 16 * to.rows + row;
    out[starts ? 0 : to.plane] = v * to.scale;
    if (starts && ends) out[to.plane] = 0.0f;
}

// This block's share of a product. Activations are in shared memory, the first places of the ring are filled or on their way.
template <int LAYOUT>
__device__ __forceinline__ void multiply_share(const Chain& c, Run& r, u32 ring_at, float* sums_of, u32 zeros_at, u32 xs_at, u16* sums) {
    constexpr int PLACES = Slots<LAYOUT>::count, BYTES = Slots<LAYOUT>::bytes, PARTS = Kind<LAYOUT>::parts, SUM_BYTES = Kind<LAYOUT>::sum_bytes;
    constexpr bool spread = Kind<LAYOUT>::spread;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 blocks = (c.product[r.product].cols + 255) / 256, parts = blocks * PARTS;
    // Addresses of this lane in the activations, the sums and every tile; steps from tile to tile.
    const u32 cols = c.product[r.product].cols, col = g & (COLUMNS - 1);
    u32 x_at = xs_at + (col * x_row_of(cols) + t * 8) * 2, sums_at = (u32)__cvta_generic_to_shared(sums + col * sum_row_of(cols) + t * 4);
    u32 x_step = 512, sums_step = SUM_BYTES;
    if (spread && (g >> 1 != t || (g & 1) >= COLUMNS)) x_at = zeros_at, x_step = 0;
    if (spread && g >= COLUMNS) sums_at = zeros_at, sums_step = 0;
    x_at = keep(x_at);
    sums_at = keep(sums_at);
    const Lane l = lane_of<LAYOUT>(lane, lane * 16, c.masks);
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
                consume<LAYOUT>(acc, keep(at - lane * 16), x, of_groups, done % PARTS, l, [&] {
                    __syncwarp();
                    if (more) copy_tile<LAYOUT>(at, r.p);
                    commit();
                });
                r.p += BYTES;
                at = at + BYTES == ring_at + PLACES * BYTES ? ring_at : at + BYTES;
            }
            if (more) advance(c, r, n, parts);
        }
        float* mine = sums_of + (2 * warp + (begin == 0)) * PLACE;
#pragma unroll
        for (int i = 0; i < 4; i += 3 - COLUMNS) {
            float v = spread ? acc[0][i] * Kind<LAYOUT>::unit + acc[1][i] : acc[0][i] + acc[1][i];
            if (spread) {
                v += __shfl_xor_sync(0xffffffffu, v, 1);
                v += __shfl_xor_sync(0xffffffffu, v, 2);
            }
            if (t == 0) mine[(i & 1) * 16 + g + 8 * (i >> 1)] = v;
        }
        __syncwarp();
        if (begin == 0 && end == parts) put(c, r.product, tile, true, true, lane < PLACE ? mine[lane] : 0.0f);
        __syncwarp();
        tile += 1;
        done = 0;
    }
}

// Rows of tiles that were cut between warps.
__device__ __forceinline__ void join_cuts(const Chain& c, const Run& r, const float* sums_of) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & (PLACE - 1);
    auto join = [&](u32 tile, u32 from_place, u32 others, bool ends) {
        float v = sums_of[from_place * PLACE + lane];
#pragma unroll 1
        for (u32 other = warp + 1; others >> other; other += 4) {
            float more[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) more[i] = others >> (other + i) & 1 ? sums_of[2 * (other + i) * PLACE + lane] : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) v += more[i];
        }
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
// Four sums of each row over a block; `partial` has room for each warp's. A lane soon goes on with one of the four alone.
__device__ __forceinline__ void sum_all(float4 v[COLUMNS], float* partial) {
    const u32 lane = threadIdx.x & 31, odd = lane & 1, upper = lane & 2;
    auto across = [](float w, int d) { return __shfl_xor_sync(0xffffffffu, w, d); };
#pragma unroll
    for (int row = 0; row < COLUMNS; ++row) {
        const float4 w = v[row];
        const float a = (odd ? w.y : w.x) + across(odd ? w.x : w.y, 1), b = (odd ? w.w : w.z) + across(odd ? w.z : w.w, 1);
        float sum = (upper ? b : a) + across(upper ? a : b, 2);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += across(sum, d);
        if (lane < 4) partial[row * WARPS * 4 + (threadIdx.x >> 5) * 4 + lane] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < COLUMNS; ++row) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS * 4; i += 32) sum += partial[row * WARPS * 4 + i + lane];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += across(sum, d);
        auto from = [&](int l) { return __shfl_sync(0xffffffffu, sum, l); };
        v[row] = make_float4(from(0), from(1), from(2), from(3));
    }
}

// f16 activations to shared memory as they are; places of the ring are filled behind them.
__device__ __forceinline__ void bring(const Chain& c, Run& r, u32 ring_at, u16* xs, u32 step, u32 cols) {
    const u16* from = step == 0 ? c.attended : c.f;
    const u32 chunks = chunks_of(cols), x_row = x_row_of(cols);
#pragma unroll 1
    for (u32 row = 0; row < COLUMNS; ++row, from += cols)
#pragma unroll 1
        for (u32 base = 0; base < chunks; base += 5 * THREADS) {
            uint4 v[5];
#pragma unroll
            for (int k = 0; k < 5; ++k) {
                const u32 i = base + k * THREADS + threadIdx.x;
                v[k] = i * 8 < cols ? load_far(from + i * 8) : make_uint4(0, 0, 0, 0);
            }
            if (row == 0 && base == 0 && step > 0) fill<2>(c, r, ring_at);
#pragma unroll
            for (int k = 0; k < 5; ++k) {
                const u32 i = base + k * THREADS + threadIdx.x;
                if (i >= chunks) continue;   // whole warps
                *(uint4*)(xs + row * x_row + place(i)) = v[k];
            }
        }
}

// The residual with what the last product adds, and its norm as activations in shared memory; every block makes all of it and keeps its part of
// the residual.
__device__ __forceinline__ void normalise(const Chain& c, Run& r, u32 ring_at, u16* xs, float* partial, u32 step, u32 cols) {
    const Tail& t = c.tail[step >> 1];
    const Piece& p = c.product[2 * step - 2].piece[0];
    const u32 chunks = chunks_of(cols), x_row = x_row_of(cols);
    // Two rows keep their residual behind their activations, whose room wider ones take later.
    float* const stash = (float*)(xs + COLUMNS * x_row);
    float4 post[FOURS], next[FOURS], x[COLUMNS == 1 ? FOURS : 1], v[COLUMNS][FOURS], more[COLUMNS][FOURS];
    const float4 none = make_float4(0, 0, 0, 0), ones = make_float4(1, 1, 1, 1);
    auto at = [](u32 i) { return (i * THREADS + threadIdx.x) * 4; };
    auto residual = [&](u32 row, u32 i) -> float4& { return COLUMNS == 1 ? x[i] : *(float4*)(stash + row * cols + at(i)); };
    float4 sum[COLUMNS];   // of squares: of what is added, of it after its norm's weights, twice their product with the residual, of the residual
#pragma unroll
    for (int row = 0; row < COLUMNS; ++row) sum[row] = none;
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
        const u32 e = at(i);
        post[i] = t.post && e < cols ? *(const float4*)(t.post + e) : ones;
        if (COLUMNS == 1) next[i] = e < cols ? *(const float4*)(t.next + e) : none;
#pragma unroll
        for (int row = 0; row < COLUMNS; ++row) {
            const float4 before = e < cols ? floats(load_far(t.before + row * cols + e)) : none;
            if (COLUMNS == 1 || e < cols) residual(row, i) = before;
            sum[row].w += dot4(before, before);
        }
    }
    wait_all(c.arrived + (step == 1 ? 0 : 3));
#pragma unroll
    for (int i = 0; i < FOURS; ++i)
#pragma unroll
        for (int row = 0; row < COLUMNS; ++row) {
            const float* from = p.out + row * cols + at(i);
            v[row][i] = at(i) < cols ? floats(load_far(from)) : none;
            more[row][i] = at(i) < cols ? floats(load_far(from + p.plane)) : none;
        }
#pragma unroll
    for (int row = 0; row < COLUMNS; ++row)
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            float4& w = v[row][i];
            w = add4(w, more[row][i]);
            sum[row].x += dot4(w, w);
            w = mul4(w, post[i]);
            sum[row].y += dot4(w, w);
            if (COLUMNS == 1 || at(i) < cols) sum[row].z += dot4(w, residual(row, i));
        }
    if (COLUMNS > 1)   // not before: there were no registers
#pragma unroll
        for (int i = 0; i < FOURS; ++i) next[i] = at(i) < cols ? *(const float4*)(t.next + at(i)) : none;
    fill<2>(c, r, ring_at);   // not before: what planes bring would wait behind it
    sum_all(sum, partial);
    const u32 first = blockIdx.x * c.kept, last = first + c.kept;
#pragma unroll
    for (int row = 0; row < COLUMNS; ++row) {
        const float4 all = sum[row];
        const float f = t.post ? rsqrtf(all.x / (float)cols + t.post_eps) : 1.0f;
        const float squares = fmaxf(f * f * all.y + 2.0f * f * all.z + all.w, 0.0f), g = rsqrtf(squares / (float)cols + t.eps);
        float* features = t.features ? t.features + (u64)c.rows[row].feature * c.feature_stride : 0;
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const u32 e = at(i);
            if (COLUMNS == 1 || e < cols) v[row][i] = add4(scale4(v[row][i], f), residual(row, i));
            const float4 w = v[row][i], h = mul4(scale4(w, g), next[i]);
            if (e >= chunks * 8) continue;   // whole warps
            *(uint2*)(xs + row * x_row + place(e >> 3) + (e & 4)) = make_uint2(floats_to_half2(h.x, h.y), floats_to_half2(h.z, h.w));
            if (e < first || e >= last || e >= cols) continue;
            *(float4*)(t.after + row * cols + e) = w;
            if (features) *(float4*)(features + e) = w;
        }
    }
}

// This block's part of SiLU of the gate times up.
__device__ __forceinline__ void activate(const Chain& c) {
    const Product& a = c.product[2];
    const float *gate = a.piece[0].out, *up = a.piece[1].out;
    const u64 gate_plane = a.piece[0].plane, up_plane = a.piece[1].plane;
    const u32 first = blockIdx.x * c.activated, end = first + c.activated, last = end < a.piece[0].rows ? end : a.piece[0].rows;
    for (u32 at = threadIdx.x * 4; at < COLUMNS * c.activated; at += THREADS * 4) {
        const u32 row = COLUMNS > 1 && at >= c.activated, e = first + at - row * c.activated, i = row * a.piece[0].rows + e;
        if (e >= last) continue;
        const float4 g0 = floats(load_far(gate + i)), g1 = floats(load_far(gate + gate_plane + i));
        const float4 u0 = floats(load_far(up + i)), u1 = floats(load_far(up + up_plane + i));
        const float4 x = add4(g0, g1), y = add4(u0, u1);
        *(uint2*)(c.f + i) = make_uint2(floats_to_half2(x.x / (1.0f + __expf(-x.x)) * y.x, x.y / (1.0f + __expf(-x.y)) * y.y),
                                        floats_to_half2(x.z / (1.0f + __expf(-x.z)) * y.z, x.w / (1.0f + __expf(-x.w)) * y.w));
    }
}

// Text that a step runs once is what the instruction cache lacks: nothing of it stands here twice.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chain(const __grid_constant__ Chain c) {
    const u32 warp = threadIdx.x >> 5;
    float* const sums_of = (float*)((u8*)shared_bytes + WARPS * RING);
    u32* const zeros = (u32*)(sums_of + 2 * WARPS * PLACE);   // 512 bytes
    float* const partial = (float*)(zeros + 128);             // four of each warp and row
    Run* const runs = (Run*)(partial + 4 * WARPS * COLUMNS) + warp * STEPS;
    u16* const xs = (u16*)(partial + 4 * WARPS * COLUMNS + WARPS * STEPS * (sizeof(Run) / 4));
    u16* const sums = xs + c.xs_halves;
    const u32 ring_at = (u32)__cvta_generic_to_shared((u8*)shared_bytes + warp * RING + (threadIdx.x & 31) * 16), xs_at = (u32)__cvta_generic_to_shared(xs), zeros_at = (u32)__cvta_generic_to_shared(zeros);
    allow_next();
    // The shares of all steps, each by a lane.
    if ((threadIdx.x & 31) < STEPS) runs[threadIdx.x & 31] = open_share(c, threadIdx.x & 31);
    if (threadIdx.x < 128) zeros[threadIdx.x] = 0;
    __syncwarp();
    Run r;
#pragma unroll 1
    for (u32 step = 0;; ++step) {
        if (step < STEPS) r = take(runs[step]), fill<0>(c, r, ring_at);
        if (step > 0) {
            __syncthreads();
            join_cuts(c, runs[step - 1], sums_of);
            if (step == STEPS) break;
            // The tail waits where it has what it needs besides.
            arrive(c.arrived + (step == 3 ? 3 : step - 1));
        }
        arrived<0>();   // all at once would hold up attention, too
        fill<1>(c, r, ring_at);
        if (step == 0) {
            arrived<0>();
            fill<2>(c, r, ring_at);
            wait_previous();
        }
        if (step == 2) {
            wait_all(c.arrived + 1);
            activate(c);
            arrive(c.arrived + 2);
            wait_all(c.arrived + 2);
        }
        const u32 cols = c.product[r.product].cols, layout = c.product[r.product].layout;
        const bool norms = step & 1;
        if (norms) normalise(c, r, ring_at, xs, partial, step, cols);
        else bring(c, r, ring_at, xs, step, cols);
        // Half rows that this warp wrote: one of each round of fours, or two of each round of chunks.
        const u32 count = norms ? FOURS : (chunks_of(cols) + THREADS - 1) / THREADS * 2;
        auto half_of = [&](u32 i) { return norms ? i * WARPS + warp : (i >> 1) * (2 * WARPS) + 2 * warp + (i & 1); };
        if (layout == FIRST) sum_groups<FIRST>(xs_at, sums, cols, count, half_of);
#ifdef SECOND
        else sum_groups<SECOND>(xs_at, sums, cols, count, half_of);
#endif
        __syncthreads();
        if (layout == FIRST) multiply_share<FIRST>(c, r, ring_at, sums_of, zeros_at, xs_at, sums);
#ifdef SECOND
        else multiply_share<SECOND>(c, r, ring_at, sums_of, zeros_at, xs_at, sums);
#endif
    }
}
