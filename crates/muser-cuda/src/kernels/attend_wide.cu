// Attention by warpgroups (sm_90) for heads of 128, keys and values of f16.
// Layout: a block takes the (up to 16) query heads of one KV head for up to eight neighbouring rows of a sequence, a warp each: its heads are 16 rows of products with
// KEYS keys, and their weights of products with these keys' values. The warps of a third warpgroup copy keys and values to a ring, in lines as tensor
// cores read them, and make their copies known; so both warpgroups read what is copied once, and one weighs keys while the other multiplies.
// Bytes: visible keys and values, once for eight rows. Few rows are bound by these, many by tensor cores.
#define KEYS 64
#define STAGES 6
#define BEHIND 4                   // stages that are on their way when one is made known
#define STAGE (KEYS * HD * 4)      // bytes: of keys the first 64 dimensions, a line of 128 bytes each, then the second; the same of values
#define ROWS 8
extern __shared__ uint4 shared_bytes[];

// grid: (kv_heads, blocks of rows, parts), 384 threads. Where there are several parts, each leaves in `partial` what it found of its share of the keys,
// maxima times `left`; else rows are gated and leave for `out`. Shared: STAGES stages, two barriers each.
extern "C" __global__ void __launch_bounds__(384, 1) attend_wide(const Row* rows, const u16* q16, int heads, const Cache cache, int block, float scale, const Halves gate, u16* out, float* partial, float left) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, shared = ((u32)__cvta_generic_to_shared(shared_bytes) + 1023) & ~1023u;
    const u32 full = shared + STAGES * STAGE, empty = full + STAGES * 8, kv_head = blockIdx.x;
    // The last rows, which see most, first.
    const int r0 = rows[gridDim.y - 1 - blockIdx.y].block;
    const Row low = rows[r0];
    const int count = low.end - low.pos < ROWS ? low.end - low.pos + 1 : ROWS;
    const Row high = rows[r0 + count - 1];
    u32 from, to, other;
    visible(low, cache, block, from, other);
    visible(high, cache, block, other, to);
    part_of_keys(from, to, blockIdx.z, gridDim.z, KEYS);
    from &= ~15u;
    const u32 tiles = from < to ? (to - from + KEYS - 1) / KEYS : 0;
    allow_next();
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; ++s) {
            open_barrier(full + s * 8, 4);
            open_barrier(empty + s * 8, 8);
        }
        open_barriers();
    }
    __syncthreads();
    if (warp >= 8) {
        // A thread copies a piece of both halves of every fourth key and value of sixteen, a warp whole lines.
        const u32 group = warp - 8, key = group * 16 + (lane >> 3), piece = lane & 7;
        const u16* const k = ((u16**)cache.k)[low.slot] + kv_head * HD + piece * 8;
        const u16* const v = ((u16**)cache.v)[low.slot] + kv_head * HD + piece * 8;
        // Places in the cache advance with the keys. What a ring that has turned holds behind the last key is masked; else the last key is read again.
        const u32 wraps = cache.window ? cache.capacity : ~0u, limit = cache.window && to > cache.capacity ? ~0u : to - 1;
        const u32 even = shared + key * 128 + (piece ^ (key & 7)) * 16, odd = even ^ 64;
        u32 next = row_of(cache, from + key);
        auto make_known = [&](u32 stage) {
            show();
            __syncwarp();
            if (lane == 0) arrive(full + stage * 8);
        };
        u32 stage = 0, round = 0;
        bool waited = false;
#pragma unroll 1
        for (u32 i = 0; i < tiles; ++i) {
            const u32 base = from + i * KEYS;
            // Keys of earlier passes are there before this one's.
            if (!waited && (base + KEYS > low.begin || i == tiles - 1)) {
                waited = true;
                wait_previous();
            }
            if (round > 0) wait_bulk(empty + stage * 8, (round - 1) & 1);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                u32 row = next + 4 * j;
                while (row >= wraps) row -= wraps;
                const u64 at = (u64)(row < limit ? row : limit) * cache.width;
                const u32 line = (j & 1 ? odd : even) + stage * STAGE + j * 512;
                copy16_near(line, k + at);
                copy16_near(line + STAGE / 4, k + at + HD / 2);
                copy16_near(line + STAGE / 2, v + at);
                copy16_near(line + STAGE / 4 * 3, v + at + HD / 2);
            }
            next += KEYS;
            while (next >= wraps) next -= wraps;
            commit();
            if (i >= BEHIND) {
                arrived<BEHIND>();
                make_known(stage >= BEHIND ? stage - BEHIND : stage + STAGES - BEHIND);
            }
            if (++stage == STAGES) stage = 0, round += 1;
        }
        arrived<0>();
        for (u32 i = tiles < BEHIND ? tiles : BEHIND; i > 0; --i) make_known(stage >= i ? stage - i : stage + STAGES - i);
        return;
    }
    // Warps that have no row do what the last one does, and leave nothing.
    const int at = r0 + ((int)warp < count ? warp : count - 1), group = heads / cache.kv_heads;
    u32 first, last, q[8][4];
    visible(rows[at], cache, block, first, last);
    wait_previous();
    const u16* const queries = q16 + ((u64)at * heads + kv_head * group) * HD + 2 * t;
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = g + (i & 1) * 8;
            q[step][i] = head < group ? *(const u32*)(queries + head * HD + step * 16 + (i >> 1) * 8) : 0;
        }
    // Of both heads the dimensions 8j + 2t and 8j + 2t + 1.
    Flash s;
    clear(s);
    const float unit = scale * 1.4426950408889634f;   // exp(x * scale) = 2^(x * unit)
    u32 stage = 0, phase = 0;
#pragma unroll 1
    for (u32 i = 0; i < tiles; ++i) {
        float c[KEYS / 8][4];
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
        wait_bulk(full + stage * 8, phase);
        wide_begin();
        const u32 k = wide_at<STAGE / 4>(shared + stage * STAGE), v = k + STAGE / 2 / 16;
#pragma unroll
        for (int step = 0; step < 8; ++step) wide_lines(c, q[step][0], q[step][1], q[step][2], q[step][3], k + (step >> 2) * (STAGE / 4 / 16) + (step & 3) * 2);
        wide_end();
        wide_done();
        weigh(s, c, from + i * KEYS, first, last, unit);
        u32 p[KEYS / 16][4];
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
            for (int j = 0; j < 4; ++j) p[step][j] = small_half2(c[2 * step + (j >> 1)][2 * (j & 1)], c[2 * step + (j >> 1)][2 * (j & 1) + 1]);
        wide_begin();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) wide_across(s.o, p[step][0], p[step][1], p[step][2], p[step][3], v + step * (16 * 128 / 16));
        wide_end();
        wide_done();
        if (lane == 0) arrive(empty + stage * 8);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    finish(s);
    if ((int)warp >= count) return;
    if (gridDim.z > 1) {
        float* const part = partial + ((u64)(at * cache.kv_heads + kv_head) * gridDim.z + blockIdx.z) * PART;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int head = g + 8 * r;
            if (head >= group) continue;
#pragma unroll
            for (int j = 0; j < 16; ++j) *(float2*)(part + head * HD + 8 * j + 2 * t) = make_float2(s.o[j][2 * r], s.o[j][2 * r + 1]);
            if (t == 0) *(float2*)(part + 16 * HD + 2 * head) = make_float2(s.max[r] * left, s.sum[r]);
        }
        return;
    }
    // All gates are on their way before the first result is written.
    u32 gates[2][16];
    const u32 column = (kv_head * group + g) * HD + 2 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < 16; ++j) gates[r][j] = gate.p && g + 8 * r < group ? *(const u32*)(gate.p + at * gate.stride + column + r * 8 * HD + 8 * j) : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (g + 8 * r >= group) continue;
        const float inv = 1.0f / s.sum[r];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            float x = s.o[j][2 * r] * inv, y = s.o[j][2 * r + 1] * inv;
            if (gate.p) {
                x *= 1.0f / (1.0f + __expf(-half_to_float((u16)gates[r][j])));
                y *= 1.0f / (1.0f + __expf(-half_to_float((u16)(gates[r][j] >> 16))));
            }
            *(u32*)(out + (u64)at * heads * HD + column + r * 8 * HD + 8 * j) = floats_to_half2(x, y);
        }
    }
}
