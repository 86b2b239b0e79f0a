// Products of 33 to 64 rows on tensor cores, straight from the tiles of layout.cuh: what widening would write and read again is most of
// their time.
// Layout: a block multiplies 16 rows of tiles, a warp each, with all activation rows, 256 columns a step: activations and tiles arrive
// in shared memory, two stages. The steps of all rows of tiles are dealt out evenly; each run of them leaves a plane, and `join` adds
// those of a row up.
// Bytes: the weights once, activations once a block. Shared memory and tensor cores bind.
#define SUMS (TYPE == Q4K || TYPE == Q5K)
#define ROWS 64
#define X_ROW 576   // bytes of 256 activations, so that the lanes of a quarter warp meet different banks
#define X_BYTES (ROWS * X_ROW)
#define STAGE_BYTES (X_BYTES + 16 * tile_bytes(TYPE))

extern __shared__ uint4 shared_bytes[];

// Scales of a lane's pieces of one tile: [row / 8][half], each twice in a register; of Q6K and FP4 two a half; of Q4K and Q5K both halves' in
// the first.
struct Heads {
    u32 scale[2][2], second[2][2], minimum[2][2];
};
__device__ __forceinline__ void read_heads(Heads& h, u32 u, u32 lane) {
    const u32 g = lane >> 2, t = lane & 3, head = u + head_at(TYPE);
    const uint2 s = SUMS ? make_uint2(0, 0) : lds64(head + lane * 8);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (SUMS) {
            const u32 at = head + (r * 8 + g) * 16;
            u32 scales, minima;
            k_scales(lds32(at), lds32(at + k_word(t) * 4), lds32(at + k_next(t) * 4), k_shift(t), 0x003f003f, scales, minima);
            h.scale[r][0] = scales;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 pair = __shfl_sync(0xffffffffu, minima, (int)(g * 4 + half * 2 + (t >> 1)));
                h.minimum[r][half] = t & 1 ? twice_high(pair) : twice_low(pair);
            }
            continue;
        }
        const u32 w = r ? s.y : s.x;
        if (TYPE == Q6K || TYPE == FP4) {
            const u32 d = TYPE == Q6K ? twice_low(lds16(u + Q6K_D + (r * 8 + g) * 2)) : 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 two = TYPE == FP4 ? fp4_scales(w, half) : hmul2(hadd2(__byte_perm(w, 0x64646464, half ? 0x4342 : 0x4140), 0xe480e480), d);
                h.scale[r][half] = twice_low(two);
                h.second[r][half] = twice_high(two);
            }
        } else {
            // As a permutation: what is a move to compilers takes more registers here than there are.
            h.scale[r][0] = __byte_perm(w, w, 0x1010);
            h.scale[r][1] = __byte_perm(w, w, 0x3232);
        }
    }
}

// A tile at u and 64 activation rows at x.
__device__ __forceinline__ void multiply(float acc[8][4], u32 u, u32 x, u32 lane, const Masks& masks) {
    Heads heads;
    read_heads(heads, u, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 q[2];
        uint2 high[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 piece = (r * 2 + half) * 32 + lane;
            q[r] = lds128(u + piece * 16);
            if (TYPE == Q5K) high[r].x = lds32(u + 2048 + piece * 4);
            if (TYPE == Q6K) high[r] = lds64(u + 2048 + piece * 8);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 f[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 w = ((const u32*)&q[r])[i], s = heads.scale[r][SUMS ? 0 : half];
                if (TYPE == Q6K) nibbles6(w, i < 2 ? high[r].x : high[r].y, i & 1, i < 2 ? s : heads.second[r][half], masks, f[r]);
                else if (TYPE == FP4) nibbles_fp4(w, i < 2 ? s : heads.second[r][half], f[r]);
                else if (TYPE == IQ4) nibbles_iq4(w, s, f[r]);
                else if (TYPE == Q5K) nibbles5(w, high[r].x, i, s, half, masks, f[r]);
                else nibbles(w, s, SUMS && half, TYPE, masks, f[r]);
                if (SUMS) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) f[r][k] = hadd2(f[r][k], heads.minimum[r][half]);
                }
            }
#pragma unroll
            for (int j = 0; j < ROWS / 8; ++j) {
                const uint4 b = lds128(x + j * 8 * X_ROW + half * 256 + i * 64);
                mma(acc[j], f[0][0], f[1][0], f[0][1], f[1][1], b.x, b.y);
                mma(acc[j], f[0][2], f[1][2], f[0][3], f[1][3], b.z, b.w);
            }
        }
    }
}

// grid: (a.grid), 512 threads, two stages of STAGE_BYTES. planes: [piece][row of x][row of the blocks].
extern "C" __global__ void __launch_bounds__(512, 1) stream(const Stream a, const u16* x, const Masks masks, float* planes) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, all = a.blocks * a.steps, width = a.blocks * 256;
    const u32 from = (u64)all * blockIdx.x / a.grid, to = (u64)all * (blockIdx.x + 1) / a.grid, shared = (u32)__cvta_generic_to_shared(shared_bytes);
    u32 block = from / a.steps, step = from - block * a.steps, next = step;   // of what is multiplied; the step that is fetched next
    // Where this warp's tile of a block begins; its steps stand one after another.
    auto tile_of = [&](u32 block) {
        const Part& p = part_of(a, block);
        u32 tile = block * 16 + warp;
        return p.w + (u64)(tile < p.tiles ? tile : p.tiles - 1) * a.steps * tile_bytes(TYPE);
    };
    const u8* w = tile_of(block) + (u64)step * tile_bytes(TYPE);
    auto fetch_tile = [&](u32 stage) {
        const u32 place = shared + stage * STAGE_BYTES + X_BYTES + warp * tile_bytes(TYPE);
#pragma unroll
        for (int o = 0; o < tile_bytes(TYPE); o += 512)
            if (o + 512 <= tile_bytes(TYPE) || o + lane * 16 < tile_bytes(TYPE)) copy16(place + o + lane * 16, w + o + lane * 16);
    };
    // Pieces of 8 activations stand as in project.cu: [half][step][t]. Behind the last column weights are zero.
    const u32 x_at = warp * X_ROW + (lane >> 4) * 256 + (lane & 3) * 64 + ((lane >> 2) & 3) * 16;
    auto fetch_x = [&](u32 stage) {
        const u32 e = next * 256 + lane * 8;
        const u16* column = x + (e < a.cols ? e : a.cols - 8);
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) {
            const u32 row = i * 16 + warp;
            copy16_near(shared + stage * STAGE_BYTES + i * 16 * X_ROW + x_at, column + (u64)(row < a.n ? row : a.n - 1) * a.cols);
        }
        commit();
    };
    // Tiles are on their way before the kernels ahead are done.
    fetch_tile(0);
    allow_next();
    wait_previous();
    fetch_x(0);
    u32 stage = 0, left = to - from;
#pragma unroll 1
    while (left > 0) {
        const u32 end = a.steps - step < left ? a.steps : step + left;
        left -= end - step;
        float acc[8][4];
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
#pragma unroll 1
        for (; step < end; ++step, stage ^= 1) {
            arrived<0>();
            __syncthreads();
            if (step + 1 < end || left > 0) {
                next = step + 1 < end ? step + 1 : 0;
                w = step + 1 < end ? w + tile_bytes(TYPE) : tile_of(block + 1);
                fetch_tile(stage ^ 1);
                fetch_x(stage ^ 1);
            }
            const u32 here = keep(shared + stage * STAGE_BYTES);
            multiply(acc, here + X_BYTES + warp * tile_bytes(TYPE), here + g * X_ROW + t * 16, lane, masks);
        }
        float* out = planes + (u64)(blockIdx.x - owner(a, block * a.steps)) * a.n * width + block * 256 + warp * 16 + g;
#pragma unroll
        for (int j = 0; j < 8; ++j)
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
