// Products of 17 rows and more by warpgroups (sm_90), straight from the tiles of layout.cuh.
// Layout: a block multiplies 16 rows of tiles, four warpgroups of four, with COLUMNS activation rows, as kernels/join.cu arranges them. Half a tile's
// columns of them are a stage of a ring that one thread fills for all; each warp has a ring of tiles of its own. So warpgroups wait for no other but where
// they are a whole ring ahead, and one makes weights while others multiply. Steps are dealt out as stream.cuh says, each run leaves a plane.
// Bytes: the weights once, activations once a block. Tensor cores, instructions that make weights and memory bind alike with 64 rows, tensor cores with 128.
#define OCTETS (COLUMNS / 8)
#define MATRIX (OCTETS * 128)    // bytes of an 8 by 8 matrix of all rows
#define STAGE_BYTES (18 * MATRIX)
// What a warp fetches at once, a tile or, of f16, half of one; how many of these a tile is, and how many are on their way.
#define UNIT (TYPE == F16 ? tile_bytes(F16) / 2 : tile_bytes(TYPE))
#define UNITS (tile_bytes(TYPE) / UNIT)
#define RING (TYPE == F16 ? 2 : Kind<TYPE>::stages)

extern __shared__ uint4 shared_bytes[];

// grid: (a.grid), 512 threads. Shared: STAGES stages, 16 rings of tiles, two barriers a stage.
extern "C" __global__ void __launch_bounds__(512, 1) stream_wide(const Stream a, const u16* x, const Masks masks, float* planes) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, all = a.blocks * a.steps, width = a.blocks * 256;
    const u32 from = (u64)all * blockIdx.x / a.grid, to = (u64)all * (blockIdx.x + 1) / a.grid, shared = (u32)__cvta_generic_to_shared(shared_bytes);
    const u32 ring = shared + STAGES * STAGE_BYTES + warp * RING * UNIT, piece = keep(lane * 16);
    const u32 full = shared + STAGES * STAGE_BYTES + 16 * RING * UNIT, empty = full + STAGES * 8;
    u32 block = from / a.steps, step = from - block * a.steps, left = to - from;
    // Where this warp's tile of a block begins; its steps stand one after another.
    auto tile_of = [&](u32 of) {
        u32 local = of;
        const Part& p = part_of(a, local);
        const u32 tile = local * 16 + warp;
        return p.w + (u64)(tile < p.tiles ? tile : p.tiles - 1) * a.steps * tile_bytes(TYPE) + piece;
    };
    const u8* w = tile_of(block) + (u64)step * tile_bytes(TYPE);
    u32 coming = left * UNITS, coming_unit = step * UNITS, coming_block = block;
    auto fetch_next = [&](u32 place) {
        if (coming > 0) {
#pragma unroll
            for (int o = 0; o < UNIT; o += Kind<TYPE>::part_bytes) fetch_at<TYPE>(place + piece + o, w + o, piece);
            w += UNIT;
            coming -= 1;
            if (++coming_unit == a.steps * UNITS && coming > 0) {
                coming_unit = 0;
                w = tile_of(++coming_block);
            }
        }
        commit();
    };
    // Tiles are on their way before the kernels ahead are done.
#pragma unroll
    for (int i = 0; i < RING; ++i) fetch_next(ring + i * UNIT);
    allow_next();
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; ++s) {
            open_barrier(full + s * 8);
            open_barrier(empty + s * 8, 16);
        }
        open_barriers();
    }
    __syncthreads();
    wait_previous();
    // The stages that the first thread fills: how many are left, where the next one stands and goes, and how often the ring went round.
    u32 fills = 2 * left, fill_step = step, fill_half = 0, fill_slot = 0, round = 0;
    auto fill = [&]() {
        if (fills == 0) return;
        fills -= 1;
        if (round > 0) wait_bulk(empty + fill_slot * 8, (round - 1) & 1);
        const u32 bytes = fill_half ? 16 * MATRIX : 18 * MATRIX;
        copy_bulk(shared + fill_slot * STAGE_BYTES, (const u8*)x + (u64)fill_step * 34 * MATRIX + fill_half * 18 * MATRIX, bytes, full + fill_slot * 8);
        if (fill_half && ++fill_step == a.steps) fill_step = 0;
        fill_half ^= 1;
        if (++fill_slot == STAGES) fill_slot = 0, round += 1;
    };
    if (threadIdx.x == 0)
        for (int s = 0; s < STAGES - 1; ++s) fill();
    const Lane l = lane_of<TYPE>(lane, piece, masks);
    u32 slot = 0, phase = 0, tile = ring;
#pragma unroll 1
    while (left > 0) {
        const u32 end = a.steps - step < left ? a.steps : step + left;
        left -= end - step;
        float acc[OCTETS][4];
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
        // Half a tile's weights of both rows times a stage of activations, with minima where there are any.
        auto multiply = [&](const u32 (&f)[4][2][4], const u32* minima) {
            wait_bulk(full + slot * 8, phase);
            wide_begin();
            const u32 b = wide_at<MATRIX>(shared + slot * STAGE_BYTES);
            if (minima) wide_rows(acc, minima[0], minima[1], minima[0], minima[1], b + 16 * (MATRIX / 16));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                wide_rows(acc, f[i][0][0], f[i][1][0], f[i][0][1], f[i][1][1], b + 4 * i * (MATRIX / 16));
                wide_rows(acc, f[i][0][2], f[i][1][2], f[i][0][3], f[i][1][3], b + (4 * i + 2) * (MATRIX / 16));
            }
            wide_end();
            // The stage before this one is free, or soon.
            if (threadIdx.x == 0) fill();
            wide_done();
            if (lane == 0) arrive(empty + slot * 8);
            if (++slot == STAGES) slot = 0, phase ^= 1;
        };
        // The next unit, once it is there; when its last part was read, its place is filled again.
        auto arrived_at = [&]() {
            arrived<RING - 1>();
            __syncwarp();
            const u32 here = keep(tile);
            tile = tile + UNIT == ring + RING * UNIT ? ring : tile + UNIT;
            return here;
        };
        auto free = [&](u32 here) {
            __syncwarp();
            fetch_next(here);
        };
#pragma unroll 1
        for (; step < end; ++step) {
            u32 f[4][2][4];
            if constexpr (TYPE == F16) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u32 here = arrived_at();
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const uint4 v = lds128(here + (i >> 2) * 2048 + (i & 1) * 1024 + ((i >> 1) & 1) * 512 + l.piece);
                        u32* const to = f[i >> 1][i & 1];
                        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
                    }
                    free(here);
                    multiply(f, nullptr);
                }
            } else {
                const u32 here = arrived_at();
                const Factors<TYPE> factors(here, l);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Quants<TYPE> q[2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) q[r].load(here, l.piece, (r * 2 + half) * 512);
                    if (half == 1) free(here);
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int r = 0; r < 2; ++r) q[r].weights(i, factors.pair(r, half), factors.upper(half, i), l.masks, f[i][r]);
                    multiply(f, Kind<TYPE>::sums && half == 0 ? factors.minima : nullptr);
                }
            }
        }
        float* out = planes + (u64)(blockIdx.x - owner(a, block * a.steps)) * a.n * width + block * 256 + warp * 16 + g;
#pragma unroll
        for (int j = 0; j < OCTETS; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const u32 row = j * 8 + 2 * t + c;
                if (row >= a.n) continue;
                out[(u64)row * width] = acc[j][c];
                out[(u64)row * width + 8] = acc[j][2 + c];
            }
        block += 1;
        step = 0;
    }
}
