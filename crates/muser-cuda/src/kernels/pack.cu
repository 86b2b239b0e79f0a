// Rows of a file's blocks to the tiles of layout.cuh, once at load. SOURCE (below) is defined by the caller.
// Layout: a thread takes one piece of 32 columns; its reads are scattered, its writes are whole words.
// Bytes: every weight once in and once out. Memory binds, far above what files deliver.
enum { FROM_F32 = 0, FROM_F16 = 1, FROM_BF16 = 2, FROM_Q8_0 = 3, FROM_Q4_0 = 4, FROM_Q4_K = 5, FROM_Q5_K = 6, FROM_Q6_K = 7, FROM_IQ4_NL = 8, FROM_IQ4_XS = 9, FROM_NVFP4 = 10, FROM_Q3_K = 11 };
#define TO (SOURCE <= FROM_BF16 ? F16 : SOURCE <= FROM_Q6_K ? SOURCE - FROM_Q8_0 + Q8 : SOURCE <= FROM_IQ4_XS ? IQ4 : SOURCE == FROM_NVFP4 ? FP4 : Q6K)
#define BLOCK_BYTES (SOURCE == FROM_Q8_0 ? 34 : SOURCE == FROM_Q4_0 || SOURCE == FROM_IQ4_NL ? 18 : SOURCE == FROM_Q4_K ? 144 : SOURCE == FROM_Q5_K ? 176 : SOURCE == FROM_Q6_K ? 210 : SOURCE == FROM_IQ4_XS ? 136 : SOURCE == FROM_NVFP4 ? 36 : 110)

__device__ __forceinline__ u16 load16(const u8* p) { return (u16)(p[0] | (p[1] << 8)); }
__device__ __forceinline__ float value_at(const u8* row, u32 i) {
    if (SOURCE == FROM_F32) return ((const float*)row)[i];
    u16 v = ((const u16*)row)[i];
    return SOURCE == FROM_F16 ? half_to_float(v) : bf16_to_float(v);
}
__device__ __forceinline__ u16 scaled(const u8* d, float norm) { return float_to_half(half_to_float(load16(d)) * norm); }

// Scale of group g of Q3_K (16 values) and IQ4_XS (32), each 32 too high.
__device__ __forceinline__ int scale_of(const u8* b, u32 g) {
    if (SOURCE == FROM_Q3_K) return ((b[96 + g % 8] >> (g / 8 * 4)) & 15) | (((b[104 + g % 4] >> (g / 4 * 2)) & 3) << 4);
    return ((b[4 + g / 2] >> (g % 2 * 4)) & 15) | (((load16(b + 2) >> (2 * g)) & 3) << 4);
}

// The largest magnitude that a scale (or a value of a float type) reaches, as the bits of a float, infinity where one is no finite number.
// grid: any, 256 threads.
extern "C" __global__ void bound(const u8* raw, u64 count, u32* out) {
    float most = 0.0f;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < count; i += (u64)gridDim.x * 256) {
        float v;
        if (SOURCE <= FROM_BF16) {
            v = fabsf(value_at(raw, 0 + i));
        } else {
            const u8* b = raw + i * BLOCK_BYTES;
            if (SOURCE == FROM_Q4_K || SOURCE == FROM_Q5_K)
                v = fmaxf(fabsf(half_to_float(load16(b))) * 64.0f, fabsf(half_to_float(load16(b + 2))) * (64.0f / 1024.0f));
            else if (SOURCE == FROM_Q6_K)
                v = fabsf(half_to_float(load16(b + 208))) * 128.0f;
            else if (SOURCE == FROM_Q3_K)
                v = fabsf(half_to_float(load16(b + 108))) * 128.0f;
            else if (SOURCE == FROM_IQ4_XS)
                v = fabsf(half_to_float(load16(b))) * 32.0f;
            else if (SOURCE == FROM_NVFP4)
                v = 8192.0f;   // scales are kept as they are, as halves 2^-8 of them: what 2^13 is to 2^5
            else
                v = fabsf(half_to_float(load16(b)));
        }
        const bool finite = v <= 3.4028234e38f;
        if (v > most || !finite) most = finite ? v : __uint_as_float(0x7f800000u);
    }
    most = warp_max(most);
    if ((threadIdx.x & 31) == 0) atomicMax(out, __float_as_uint(most));
}

__device__ __forceinline__ int quant(const u8* b, u32 e) {
    if (SOURCE == FROM_Q8_0) return (int)((i8)b[2 + e]) + 128;
    if (SOURCE == FROM_NVFP4) return (b[4 + e / 16 * 8 + (e & 7)] >> (e & 8 ? 4 : 0)) & 15;
    if (SOURCE == FROM_IQ4_XS) return (b[8 + e / 32 * 16 + (e & 15)] >> (e & 16 ? 4 : 0)) & 15;
    if (SOURCE == FROM_Q3_K) {
        // Three bits less 4 are six less 32.
        u32 j = e & 31, group = e / 32;
        return ((b[32 + e / 128 * 32 + j] >> (group % 4 * 2)) & 3) + ((b[j] >> group) & 1) * 4 + 28;
    }
    if (SOURCE == FROM_Q4_0 || SOURCE == FROM_IQ4_NL) return (b[2 + (e & 15)] >> (e < 16 ? 0 : 4)) & 15;
    if (SOURCE == FROM_Q6_K) {
        u32 half = e / 128, l = e % 32, part = e % 128 / 32;
        int low = (b[half * 64 + l + (part & 1) * 32] >> (part >= 2 ? 4 : 0)) & 15;
        return low | (((b[128 + half * 32 + l] >> (2 * part)) & 3) << 4);
    }
    int q = (b[(SOURCE == FROM_Q4_K ? 16 : 48) + e / 64 * 32 + (e & 31)] >> (e & 32 ? 4 : 0)) & 15;
    if (SOURCE == FROM_Q5_K) q |= ((b[16 + (e & 31)] >> (e / 32)) & 1) << 4;
    return q;
}

// The largest power of two that keeps a bound times it at most 2^exponent, as `norm` in weights.rs.
__device__ __forceinline__ float norm_of(u32 bound, int exponent) {
    if (bound == 0) return 1.0f;
    int n = exponent - ((int)(bound >> 23) - 127) - ((bound & 0x7fffff) != 0 ? 1 : 0);
    n = n < -60 ? -60 : n > 60 ? 60 : n;
    return __uint_as_float((u32)(n + 127) << 23);
}

// grid: ceil(tiles * blocks * 128 / 256), 256 threads. Rows and columns beyond the matrix become zero.
extern "C" __global__ void pack(const u8* raw, u64 row_bytes, u32 rows, u32 cols, const u32* bound, int exponent, u8* out) {
    const float norm = norm_of(*bound, exponent);
    u32 blocks = (cols + 255) / 256;
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x, tile = at / 128 / blocks;
    if (tile >= (rows + 15) / 16) return;
    u32 piece = at % 128, block = at / 128 % blocks, r = piece >> 6, half = (piece >> 5) & 1, lane = piece & 31, g = lane >> 2, t = lane & 3;
    u32 row = tile * 16 + r * 8 + g, first = block * 256 + half * 128 + t * 32;
    u8* u = out + (tile * blocks + block) * tile_bytes(TO);
    const u8* from = raw + (u64)row * row_bytes;
    bool live = row < rows && first < cols;
    if (TO == F16) {
        for (int i = 0; i < 4; ++i) {
            u16* to = (u16*)(u + (half * 2 + (i >> 1)) * 2048) + ((r * 2 + (i & 1)) * 32 + lane) * 8;
            for (int k = 0; k < 8; ++k) to[k] = live ? float_to_half(value_at(from, first + i * 8 + k) * norm) : (u16)0;
        }
        return;
    }
    u8* head = u + head_at(TO);
    const bool small = SOURCE == FROM_Q8_0 || SOURCE == FROM_Q4_0 || SOURCE == FROM_IQ4_NL;
    // A block of 32 is one piece, of 64 two; a block of 256 is a tile's row.
    const u8* b = from + (u64)(small ? first / 32 : SOURCE == FROM_NVFP4 ? first / 64 : block) * BLOCK_BYTES;
    u32 base = small ? 0 : SOURCE == FROM_NVFP4 ? first % 64 : half * 128 + t * 32;
    if (TO == Q8) {
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 8; ++k) u[((piece >> 5) * 2 + (i >> 1)) * 512 + lane * 16 + (i & 1) * 8 + k] = live ? quant(b, i * 8 + k) : 128;
    } else {
        u32 high[2] = {0, 0};
        for (int i = 0; i < 4; ++i) {
            u32 word = 0, pairs[4] = {0, 0, 0, 0};
            for (int k = 0; k < 8; ++k) {
                u32 q = live ? quant(b, base + i * 8 + k) : 0;
                if (TO == FP4) pairs[k >> 1] |= ((q & 7) << 9 | (q & 8) << 12) << (16 * (k & 1));
                else word |= (q & 15) << (4 * nibble_of(TO, k));
                if (TO == Q5K) high[0] |= (q >> 4) << q5_bit(i, k);
                if (TO == Q6K) high[i >> 1] |= (q >> 4) << q6_bit(i, k);
            }
            ((u32*)u)[piece * 4 + i] = TO == FP4 ? join_fp4(pairs) : word;
        }
        if (TO == Q5K) ((u32*)(u + 2048))[piece] = high[0];
        if (TO == Q6K) ((uint2*)(u + 2048))[piece] = make_uint2(high[0], high[1]);
    }
    if (small) ((u16*)head)[lane * 4 + r * 2 + half] = live ? scaled(b, norm) : (u16)0;
    if (SOURCE == FROM_IQ4_XS) {
        float scale = live ? half_to_float(load16(b)) * (float)(scale_of(b, base / 32) - 32) * norm : 0.0f;
        ((u16*)head)[lane * 4 + r * 2 + half] = float_to_half(scale);
    }
    if (TO == FP4) {
        // The sign is not read, and what would be no number is nothing.
        for (int s = 0; s < 2; ++s) {
            u8 scale = live ? b[base / 16 + s] : (u8)0;
            head[lane * 8 + (r * 2 + half) * 2 + s] = scale == 0x7f ? (u8)0 : (u8)(scale & 0x7f);
        }
    }
    if (TO == Q6K) {
        for (int s = 0; s < 2; ++s) {
            int scale = SOURCE == FROM_Q6_K ? (int)(i8)b[192 + base / 16 + s] : scale_of(b, base / 16 + s) - 32;
            head[lane * 8 + (r * 2 + half) * 2 + s] = live ? (u8)(scale + 128) : (u8)128;
        }
        if (half == 0 && t == 0) ((u16*)(u + Q6K_D))[row & 15] = live ? scaled(b + (SOURCE == FROM_Q6_K ? 208 : 108), norm) : (u16)0;
    }
    if ((TO == Q4K || TO == Q5K) && half == 0 && t == 0) {
        u64 low = 0;
        u32 last = 0;
        for (int group = 0; group < 8 && live; ++group) {
            const u8* s = b + 4;
            u32 scale = group < 4 ? s[group] & 63 : (s[group + 4] & 15) | ((s[group - 4] >> 6) << 4);
            u32 min = group < 4 ? s[group + 4] & 63 : (s[group + 4] >> 4) | ((s[group] >> 6) << 4);
            u32 bits[2] = {24u * (group & 3) + 12u * (group >> 2), 24u * (group >> 1) + 6u + 12u * (group & 1)}, fields[2] = {scale, min};
            for (int f = 0; f < 2; ++f) {
                if (bits[f] < 64) low |= (u64)fields[f] << bits[f];
                if (bits[f] + 6 > 64) last |= bits[f] >= 64 ? fields[f] << (bits[f] - 64) : fields[f] >> (64 - bits[f]);
            }
        }
        u32* h = (u32*)(head + (row & 15) * 16);
        h[0] = live ? (u32)scaled(b, norm) | ((u32)scaled(b + 2, norm) << 16) : 0;
        h[1] = (u32)low;
        h[2] = (u32)(low >> 32);
        h[3] = last;
    }
}
