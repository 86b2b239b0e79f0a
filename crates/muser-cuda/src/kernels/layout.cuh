// How matrices lie on the card: tiles of 16 rows by 256 columns, each tile the bytes that one warp multiplies.
// Lane 4g + t of a warp owns, in rows g and g + 8, columns 128 * half + 32 * t + 8 * step + 0..7 (half 0..1, step 0..3): what the
// A operand of mma.m16n8k16 wants, so that no value changes lanes. A piece is the 32 columns of one (row, half) and lane; piece
// number (row / 8 * 2 + half) * 32 + lane. Scales were multiplied by a power of two (`norm` in weights.rs) to fit f16 well.
//
// type  bytes of a tile: content
// F16   4 parts of 2048: part 2 * half + step / 2; in it [row / 8][step % 2][lane] 8 halves
// Q8    4096: [piece / 32][step / 2][lane] 16 quants plus 128; 256: [lane][row / 8][half] f16 scales
// Q4    2048: [piece] 32 quants; 256: scales as Q8
// Q4K   2048: [piece] 32 quants; 256: [row] d, dmin, then 24 bits a t: scale of group t, minimum of 2t, then of t + 4 and 2t + 1
// Q5K   2048; 512: [piece] 32 high bits; 256 as Q4K
// Q6K   2048; 1024: [piece] 32 pairs of high bits; 256: [lane][row / 8][half][step / 2] scales plus 128; 32: [row] d
// IQ4   as Q4: the quants are places in a table of 16 values
// FP4   2048: [piece] 32 quants, E2M1; 256: [lane][row / 8][half][step / 2] scales, UE4M3
// A word of four-bit quants holds elements 0, 4, 2, 6, 1, 5, 3, 7 from its lowest nibble on: masks leave pairs of neighbours. Those of
// IQ4 are looked up four at a time and stand in their order, those of FP4 as fields_fp4 wants them.
enum { F16 = 0, Q8 = 1, Q4 = 2, Q4K = 3, Q5K = 4, Q6K = 5, IQ4 = 6, FP4 = 7 };

__device__ constexpr int tile_bytes(int type) {
    return type == F16 ? 8192 : type == Q8 ? 4352 : type == Q4 || type == Q4K || type == IQ4 || type == FP4 ? 2304 : type == Q5K ? 2816 : 3360;
}
// Where heads or scales begin.
__device__ constexpr int head_at(int type) { return type == Q8 ? 4096 : type == Q5K ? 2560 : type == Q6K ? 3072 : 2048; }
#define Q6K_D 3328

// Nibble of element 0..7 in a word of four-bit quants.
__device__ __forceinline__ int nibble_of(int type, int k) { return type == IQ4 ? k : (k & 4 ? 1 : 0) + (k & 1 ? 4 : 0) + (k & 2 ? 2 : 0); }
// Bit of the high bits of element k of step i: Q5K in a word a piece, Q6K in a word for two steps.
__device__ __forceinline__ int q5_bit(int i, int k) { return (k >> 1) * 4 + i + (k & 1) * 16; }
__device__ __forceinline__ int q6_bit(int i, int k) {
    int pair = k >> 1, at = i & 1 ? (pair == 0 ? 0 : pair == 1 ? 2 : pair == 2 ? 12 : 14) : (pair == 0 ? 4 : pair == 1 ? 6 : pair == 2 ? 8 : 10);
    return at + (k & 1) * 16;
}

// Scales of groups t and t + 4, and negated minima of groups 2t and 2t + 1, each pair as halves, of one row of Q4K or Q5K: out of
// its first word and the two words that hold its 24 bits, `shift` bits into the first: a scale and a minimum, then the others. `six` is
// six_bits of Masks (below).
__device__ __forceinline__ void k_scales(u32 dm, u32 lo, u32 hi, u32 shift, u32 six, u32& scales, u32& minima) {
    u32 x = __funnelshift_r(lo, hi, shift);
    x = __byte_perm(x, x << 4, 0x7610);
    // 0x6400 is 1024 as f16: small integers in its mantissa are added exactly; 0xe400 is -1024. From 0xe400 and 1024 comes a negated one.
    scales = hmul2(hadd2((x & six) | 0x64006400, 0xe400e400), twice_low(dm));
    minima = hmul2(hadd2(((x >> 6) & six) | 0xe400e400, 0x64006400), twice_high(dm));
}
// Words of a row's head in which the bits of t begin and end, and the shift.
__device__ __forceinline__ u32 k_word(u32 t) { return 1 + ((3 * t) >> 2); }
__device__ __forceinline__ u32 k_next(u32 t) { return t == 3 ? 3 : k_word(t) + 1; }
__device__ __forceinline__ u32 k_shift(u32 t) { return (24 * t) & 31; }

// Four of the 16 values of IQ4_NL and IQ4_XS (kvalues_iq4nl of ggml), each 128 too high.
#define IQ4_TABLE(i) ((i) == 0 ? 0x3f2d1801u : (i) == 1 ? 0x766a5d4fu : (i) == 2 ? 0xa6998d81u : 0xf1d9c5b5u)

// Eight E2M1 values as four pairs of halves 2^-14 of what they are: their bits are those of such a half, a sign and three more. A word
// holds them so that four shifts and four masks are enough: no four shifts of a word alone bring all 32 bits to these places, two by
// two combined do. join_fp4 turns it round.
#define E2M1_PAIR 0x8e008e00
__device__ __forceinline__ void fields_fp4(u32 w, u32* out) {
    out[0] = (w << 6) & E2M1_PAIR;
    out[1] = (w << 9) & E2M1_PAIR;
    out[2] = (w ^ (w << 2)) & E2M1_PAIR;
    out[3] = (w ^ (w >> 3)) & E2M1_PAIR;
}
__device__ __forceinline__ u32 join_fp4(const u32* pairs) {
    u32 w = pairs[0] >> 6 | pairs[1] >> 9;
    // What is left is known bit by bit, from those before.
    w |= (pairs[3] ^ (w >> 3)) & 0x80008000;
    w |= ((pairs[2] ^ w) & 0x80008000) >> 2;
    w |= (pairs[2] ^ (w << 2)) & 0x08000800;
    w |= (pairs[3] ^ (w >> 3)) & 0x04000400;
    w |= ((pairs[3] ^ w) & 0x0a000a00) << 3;
    return w | ((pairs[2] ^ w) & 0x06000600) >> 2;
}

// One weight, for reading a row of an embedding table.
__device__ inline float weight(int type, const u8* base, u32 cols, u32 row, u32 i) {
    u32 blocks = (cols + 255) / 256, e = i & 255, half = e >> 7, t = (e >> 5) & 3, step = (e >> 3) & 3, k = e & 7;
    u32 r = (row >> 3) & 1, g = row & 7, lane = 4 * g + t, piece = (r * 2 + half) * 32 + lane;
    const u8* u = base + ((u64)(row >> 4) * blocks + (i >> 8)) * tile_bytes(type);
    if (type == F16) return half_to_float(((const u16*)(u + (half * 2 + (step >> 1)) * 2048))[((r * 2 + (step & 1)) * 32 + lane) * 8 + k]);
    const u8* head = u + head_at(type);
    if (type == Q8) {
        float d = half_to_float(((const u16*)head)[lane * 4 + r * 2 + half]);
        return d * (float)((int)u[(((r * 2 + half) * 2 + (step >> 1)) * 32 + lane) * 16 + (step & 1) * 8 + k] - 128);
    }
    const u32 word = ((const u32*)u)[piece * 4 + step];
    if (type == FP4) {
        // Both as halves: 2^-14 and 2^-8 of what they are, of which the caller's norm knows the second.
        u32 pairs[4];
        fields_fp4(word, pairs);
        float scale = half_to_float((u16)(head[lane * 8 + (r * 2 + half) * 2 + (step >> 1)] << 7));
        return half_to_float((u16)(pairs[k >> 1] >> (16 * (k & 1)))) * 16384.0f * scale;
    }
    int q = (word >> (4 * nibble_of(type, k))) & 15;
    if (type == IQ4) {
        u32 value = (IQ4_TABLE(q >> 2) >> (8 * (q & 3))) & 255;
        return half_to_float(((const u16*)head)[lane * 4 + r * 2 + half]) * (float)((int)value - 128);
    }
    if (type == Q4) return half_to_float(((const u16*)head)[lane * 4 + r * 2 + half]) * (float)(q - 8);
    if (type == Q6K) {
        q |= ((((const u32*)(u + 2048))[piece * 2 + (step >> 1)] >> q6_bit(step, k)) & 3) << 4;
        float d = half_to_float(((const u16*)(u + Q6K_D))[row & 15]);
        return d * (float)((int)head[lane * 8 + (r * 2 + half) * 2 + (step >> 1)] - 128) * (float)(q - 32);
    }
    if (type == Q5K) q |= ((((const u32*)(u + 2048))[piece] >> q5_bit(step, k)) & 1) << 4;
    const u32* h = (const u32*)(head + (row & 15) * 16);
    auto field = [&](int bit) { return (int)((((u64)h[1 + bit / 32] | (bit / 32 < 2 ? (u64)h[2 + bit / 32] << 32 : 0)) >> (bit & 31)) & 63); };
    int group = half * 4 + t, scale = field(24 * t + 12 * half), min = field(24 * (group >> 1) + 6 + 12 * (group & 1));
    return half_to_float((u16)h[0]) * (float)scale * (float)q - half_to_float((u16)(h[0] >> 16)) * (float)min;
}

// Masks 0x000f000f and 0x00f000f0 in registers: an instruction has room for one constant, and compilers would move the other before
// each, wherever they know it; so kernels get them as parameters.
struct Masks {
    u32 low, high;
};
__device__ __forceinline__ u32 six_bits(const Masks& m) { return m.low | m.low << 2; }   // 0x003f003f

// Eight quants of a piece's step as four pairs of 16 bits. Over MAGIC they stand in mantissas of halves, from 1024 on, or, the second two pairs,
// which are 16 times as large, from 64 on; over nothing they are halves 2^-24 of what they are (subnormal, which products take as they come),
// or 2^-20.
struct Magic {
    u32 low, high;
};
#define MAGIC (Magic{0x64006400, 0x54005400})
__device__ __forceinline__ void fields4(u32 w, const Magic& over, const Masks& m, u32* out) {
    u32 v = w >> 8;
    out[0] = (w & m.low) | over.low;
    out[1] = (v & m.low) | over.low;
    out[2] = (w & m.high) | over.high;
    out[3] = (v & m.high) | over.high;
}
__device__ __forceinline__ void fields5(u32 w, u32 h, int step, const Magic& over, const Masks& m, u32* out) {
    u32 v = w >> 8, y = h >> step;
    const u32 bit = m.high & m.low << 1;   // 0x00100010
    out[0] = and_or(y << 4, bit, and_or(w, m.low, over.low));
    out[1] = and_or(y, bit, and_or(v, m.low, over.low));
    out[2] = and_or(y, bit << 4, and_or(w, m.high, over.high));
    out[3] = and_or(y >> 4, bit << 4, and_or(v, m.high, over.high));
}
__device__ __forceinline__ void fields6(u32 w, u32 h, int step, const Magic& over, const Masks& m, u32* out) {
    u32 v = w >> 8;
    u32 ha = step & 1 ? h << 4 : h, hb = step & 1 ? h << 2 : h >> 2, hc = step & 1 ? h >> 4 : h, hd = step & 1 ? h >> 6 : h >> 2;
    const u32 bits = m.high & m.low << 2;   // 0x00300030
    out[0] = and_or(ha, bits, and_or(w, m.low, over.low));
    out[1] = and_or(hb, bits, and_or(v, m.low, over.low));
    out[2] = and_or(hc, bits << 4, and_or(w, m.high, over.high));
    out[3] = and_or(hd, bits << 4, and_or(v, m.high, over.high));
}

// Eight weights of a piece's step as four pairs of halves, without minima; of two scales the one named.
__device__ __forceinline__ u32 scale_of(u32 scales, bool high) { return high ? twice_high(scales) : twice_low(scales); }
__device__ __forceinline__ void scale_fields(u32 scales, bool high, u32* out) {
    // (1024 + q) * s - 1024 * s is exact before its one rounding, as is (64 + q) * s - 64 * s.
    const u32 s = scale_of(scales, high), c0 = scale_of(hmul2(scales, 0xe400e400), high), c1 = scale_of(hmul2(scales, 0xd400d400), high);
    out[0] = hfma2(out[0], s, c0);
    out[1] = hfma2(out[1], s, c0);
    out[2] = hfma2(out[2], s, c1);
    out[3] = hfma2(out[3], s, c1);
}
__device__ __forceinline__ void nibbles(u32 w, u32 scales, bool high, int type, const Masks& m, u32* out) {
    fields4(w, MAGIC, m, out);
    if (type != Q4) return scale_fields(scales, high, out);
    const u32 scale = scale_of(scales, high);
    // 0xe408 is -1032, 0xd480 is -72: eight less.
    out[0] = hmul2(hadd2(out[0], 0xe408e408), scale);
    out[1] = hmul2(hadd2(out[1], 0xe408e408), scale);
    out[2] = hmul2(hadd2(out[2], 0xd480d480), scale);
    out[3] = hmul2(hadd2(out[3], 0xd480d480), scale);
}
__device__ __forceinline__ void nibbles5(u32 w, u32 h, int step, u32 scales, bool high, const Masks& m, u32* out) {
    fields5(w, h, step, MAGIC, m, out);
    scale_fields(scales, high, out);
}
__device__ __forceinline__ void nibbles6(u32 w, u32 h, int step, u32 scale, const Masks& m, u32* out) {
    fields6(w, h, step, MAGIC, m, out);
    // 0xe420 is -1056; 0xd600 is -96.
    out[0] = hmul2(hadd2(out[0], 0xe420e420), scale);
    out[1] = hmul2(hadd2(out[1], 0xe420e420), scale);
    out[2] = hmul2(hadd2(out[2], 0xd600d600), scale);
    out[3] = hmul2(hadd2(out[3], 0xd600d600), scale);
}
// Four values of the table, as bytes: selectors have three bits, the fourth chooses between the table's halves.
__device__ __forceinline__ u32 four_iq4(u32 q) {
    u32 at = q & 0x7777;
    u32 low = __byte_perm(IQ4_TABLE(0), IQ4_TABLE(1), at), high = __byte_perm(IQ4_TABLE(2), IQ4_TABLE(3), at);
    return __byte_perm(low, high, 0x3210 | ((q & 0x8888) >> 1));
}
__device__ __forceinline__ void nibbles_fp4(u32 w, u32 scale, u32* out) {
    fields_fp4(w, out);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = hmul2(out[i], scale);
}
// Two UE4M3 scales, bytes 0 and 1 or 2 and 3 of a word, as halves 2^6 times what they are: their bits are those of a half 2^8 times
// too small.
__device__ __forceinline__ u32 fp4_scales(u32 w, int pair) { return hmul2(__byte_perm(w, 0, pair ? 0x4342 : 0x4140) << 7, 0x74007400); }
// Eight bytes as pairs of 16 bits over `magic`, as fields4.
__device__ __forceinline__ void fields8(u32 lo, u32 hi, u32 magic, u32* out) {
    out[0] = __byte_perm(lo, magic, 0x4140);
    out[1] = __byte_perm(lo, magic, 0x4342);
    out[2] = __byte_perm(hi, magic, 0x4140);
    out[3] = __byte_perm(hi, magic, 0x4342);
}
// Eight bytes, each 128 too high (0xe480 is -1152), times a scale.
__device__ __forceinline__ void bytes8(u32 lo, u32 hi, u32 scale, u32* out) {
    fields8(lo, hi, 0x64646464, out);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = hmul2(hadd2(out[i], 0xe480e480), scale);
}
__device__ __forceinline__ void nibbles_iq4(u32 w, u32 scale, u32* out) { bytes8(four_iq4(w), four_iq4(w >> 16), scale, out); }
