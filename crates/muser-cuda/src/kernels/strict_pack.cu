// Rows of a file's blocks to the panels of panels.cuh, once at load; SOURCE as in pack.cu, which stands before this.
// Layout: a thread takes eight weights of a row, those that one thread multiplies together; its writes are whole words.
// Bytes: every weight once in and once out. Memory binds, far above what files deliver.
#define FORM (SOURCE == FROM_F32 ? AS_F32 : SOURCE == FROM_F16 ? AS_F16 : SOURCE == FROM_BF16 ? AS_BF16 : SOURCE == FROM_Q8_0 ? AS_BYTE : SOURCE == FROM_Q4_0 ? AS_NIBBLE : SOURCE == FROM_Q4_K ? AS_MIN : SOURCE == FROM_Q5_K ? AS_BYTE_MIN : SOURCE == FROM_NVFP4 ? AS_FP4 : SOURCE == FROM_Q6_K || SOURCE == FROM_Q3_K ? AS_FINE : AS_TABLE)
#define BLOCK_LENGTH (SOURCE == FROM_Q8_0 || SOURCE == FROM_Q4_0 || SOURCE == FROM_IQ4_NL ? 32 : SOURCE == FROM_NVFP4 ? 64 : 256)

// Scale and minimum for element e of a block, as the reference makes them.
__device__ __forceinline__ float2 scale_and_min(const u8* b, u32 e) {
    float d = half_to_float(load16(b));
    u32 g = e / 32;
    if (SOURCE == FROM_Q4_K || SOURCE == FROM_Q5_K) {
        const u8* s = b + 4;
        u32 scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | ((s[g - 4] >> 6) << 4), min = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | ((s[g] >> 6) << 4);
        return make_float2(d * (float)scale, half_to_float(load16(b + 2)) * (float)min);
    }
    if (SOURCE == FROM_Q6_K) return make_float2(half_to_float(load16(b + 208)) * (float)((i8)b[192 + e / 16]), 0.0f);
    if (SOURCE == FROM_Q3_K) return make_float2(half_to_float(load16(b + 108)) * (float)(scale_of(b, e / 16) - 32), 0.0f);
    if (SOURCE == FROM_IQ4_XS) return make_float2(d * (float)(scale_of(b, g) - 32), 0.0f);
    if (SOURCE == FROM_NVFP4) {
        // Half of a UE4M3 number; its top bit is not read.
        u32 bits = b[e / 16], exponent = (bits >> 3) & 15;
        if (bits == 0x7f) return make_float2(0.0f, 0.0f);
        return make_float2(exponent ? (float)(8 + (bits & 7)) * __uint_as_float((exponent + 116) << 23) : (float)(bits & 7) * (1.0f / 1024.0f), 0.0f);
    }
    return make_float2(d, 0.0f);
}

// grid: ceil(panels * pairs of columns * 32 / 256), 256 threads. Rows beyond the matrix stay as they are. negative: 1 where a scale of a
// form with minima has a sign.
extern "C" __global__ void strict_pack(const u8* raw, u64 row_bytes, u32 rows, u32 cols, u8* out, u32* negative) {
    const u32 tiles = tiles_of(FORM, cols), pairs = tiles * pairs_of(FORM);
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    const u32 q = at & 7, r = (at >> 3) & 3, pair = at / 32 % pairs;
    const u64 panel = at / 32 / pairs, row = panel * 4 + r;
    if (row >= rows) return;
    const u8* from = raw + row * row_bytes;
    u8* tile = out + (panel * tiles + pair / pairs_of(FORM)) * tile_of(FORM);
    const u32 p = pair % pairs_of(FORM);
    u32 codes[8];
    float2 scales[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        // Columns beyond the matrix: a code above its offset times -0.0.
        u32 first = pair * 64 + half * 32 + q * 4;
        const bool there = first < cols;
        const u8* b = from + (u64)(first / BLOCK_LENGTH) * BLOCK_BYTES;
        for (u32 e = 0; e < 4; ++e) {
            if (is_float(FORM))
                codes[half * 4 + e] = FORM == AS_F32 ? (there ? ((const u32*)from)[first + e] : 0x80000000) : (there ? ((const u16*)from)[first + e] : 0x8000);
            else
                codes[half * 4 + e] = there ? quant(b, first % BLOCK_LENGTH + e) + (FORM == AS_FINE ? 96 : 0) : is_byte(FORM) ? 129 : FORM == AS_FP4 ? 1 : 15;
        }
        if (!is_float(FORM)) {
            scales[half] = there ? scale_and_min(b, first % BLOCK_LENGTH) : make_float2(-0.0f, 0.0f);
            scales[half].x *= 8388608.0f;
        }
    }
    if (FORM == AS_F32) {
        *(uint4*)(tile + r * 128 + q * 16) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
        *(uint4*)(tile + 512 + r * 128 + q * 16) = make_uint4(codes[4], codes[5], codes[6], codes[7]);
    } else if (is_float(FORM)) {
        *(uint4*)(tile + p * 512 + r * 128 + q * 16) = make_uint4(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16, codes[4] | codes[5] << 16, codes[6] | codes[7] << 16);
    } else if (is_byte(FORM)) {
        u32 a = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24, b = codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24;
        *(uint2*)(tile + p * 256 + r * 64 + q * 8) = make_uint2(a, b);
    } else {
        u32 word = 0;
        const bool table = FORM == AS_TABLE || FORM == AS_FP4;
        for (u32 i = 0; i < 8; ++i) word |= codes[i] << (table ? i * 4 : (i & 3) * 8 + (i >> 2) * 4);
        *(u32*)(tile + p * 128 + r * 32 + q * 4) = word;
    }
    u8* to = tile + codes_of(FORM);
    if (has_min(FORM) && q == 0 && (__float_as_uint(scales[0].x) | __float_as_uint(scales[1].x)) >> 31) *negative = 1;
    if (has_min(FORM) && q == 0) *(float4*)(to + p * 64 + r * 16) = make_float4(scales[0].x, scales[0].y, scales[1].x, scales[1].y);
    if (is_fine(FORM) && (q & 3) == 0) *(float2*)(to + p * 64 + r * 16 + (q >> 2) * 8) = make_float2(scales[0].x, scales[1].x);
    if (!is_float(FORM) && !has_min(FORM) && !is_fine(FORM) && q == 0) *(float2*)(to + p * 32 + r * 8) = make_float2(scales[0].x, scales[1].x);
}
