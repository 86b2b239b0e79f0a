// One weight at a time from each layout that the device keeps: the exact block formulas of muser-format, each operation rounded once.
// Layouts: blocks as in GGUF for Q4_K (144 bytes) and Q5_K (176), which are multiples of 16; other types are planar in each row
// (quants, then scales, padded to 16), so that 16-byte loads stay aligned.
enum { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, Q4_K = 5, Q5_K = 6, Q6_K = 7 };

__device__ __forceinline__ u32 pad16(u32 n) { return (n + 15u) & ~15u; }

// Bytes of a row of `cols` weights.
__device__ __forceinline__ u64 row_bytes(int type, u32 cols) {
    switch (type) {
        case F32: return (u64)cols * 4;
        case F16: case BF16: return (u64)cols * 2;
        case Q8_0: return cols + pad16(cols / 32 * 2);
        case Q4_0: return cols / 2 + pad16(cols / 32 * 2);
        case Q4_K: return (u64)cols / 256 * 144;
        case Q5_K: return (u64)cols / 256 * 176;
        default: return (u64)cols / 256 * 208 + pad16(cols / 256 * 2);
    }
}

// Scale and minimum of group s (0..7) out of the 12 packed bytes of Q4_K and Q5_K.
__device__ __forceinline__ void k_scale(u32 w0, u32 w1, u32 w2, int s, int& scale, int& min) {
    if (s < 4) {
        scale = (w0 >> (8 * s)) & 63;
        min = (w1 >> (8 * s)) & 63;
    } else {
        int t = 8 * (s - 4);
        scale = ((w2 >> t) & 15) | (((w0 >> (t + 6)) & 3) << 4);
        min = ((w2 >> (t + 4)) & 15) | (((w1 >> (t + 6)) & 3) << 4);
    }
}

__device__ inline float weight(int type, const u8* row, u32 cols, u32 i) {
    switch (type) {
        case F32: return ((const float*)row)[i];
        case F16: return half_to_float(((const u16*)row)[i]);
        case BF16: return bf16_to_float(((const u16*)row)[i]);
        case Q8_0: return half_to_float(((const u16*)(row + cols))[i / 32]) * (float)((const i8*)row)[i];
        case Q4_0: {
            u32 b = i / 32, j = i % 32;
            int q = (row[b * 16 + (j & 15)] >> (j < 16 ? 0 : 4)) & 15;
            return half_to_float(((const u16*)(row + cols / 2))[b]) * (float)(q - 8);
        }
        case Q4_K: case Q5_K: {
            const u8* b = row + (u64)(i / 256) * (type == Q4_K ? 144 : 176);
            const u32* head = (const u32*)b;
            int j = i % 256, s = j / 32, scale, min;
            k_scale(head[1], head[2], head[3], s, scale, min);
            int q = (b[(type == Q4_K ? 16 : 48) + s / 2 * 32 + j % 32] >> (s & 1 ? 4 : 0)) & 15;
            if (type == Q5_K) q |= ((b[16 + j % 32] >> s) & 1) << 4;
            float d = half_to_float((u16)head[0]) * (float)scale, m = half_to_float((u16)(head[0] >> 16)) * (float)min;
            return __fsub_rn(__fmul_rn(d, (float)q), m);
        }
        default: {
            u32 blocks = cols / 256, b = i / 256, j = i % 256;
            const u8 *ql = row + b * 128, *qh = row + blocks * 128 + b * 64;
            const i8* scales = (const i8*)(row + blocks * 192 + b * 16);
            u32 half = j / 128, r = j % 128, l = r % 32, part = r / 32;
            int low = (ql[half * 64 + l + (part & 1) * 32] >> (part >= 2 ? 4 : 0)) & 15;
            int q = (low | (((qh[half * 32 + l] >> (2 * part)) & 3) << 4)) - 32;
            float d = half_to_float(((const u16*)(row + blocks * 208))[b]) * (float)scales[half * 8 + l / 16 + part * 2];
            return d * (float)q;
        }
    }
}
