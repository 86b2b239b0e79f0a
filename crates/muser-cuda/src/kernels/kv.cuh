// Keys and values of q8_0: 32 dimensions share a factor, an f16; a value is factor * (byte - 128). Bytes stand where a cache of f16 has its
// halves; factors stand in rows of their own, four a head, and the tables of their addresses follow those of keys and values.
#ifdef KV_Q8_0
#define FACTORS 128           // entries of the tables of keys and values of a cache
#define BIASED 0x64646464u   // a half of this high byte and a low byte b is 1024 + b

struct Plane {
    u8* at;
    u16* factors;
};
#define PLANE(table, slot, head) Plane{((u8**)(table))[slot] + (head) * HD, ((u16**)(table))[FACTORS + (slot)] + (head) * (HD / 32)}

// The factor of 32 values whose largest magnitude is `most`, and its reciprocal. No f16 is too small for 127 times the factor.
__device__ __forceinline__ u16 factor_of(float most, float& inverse) {
    const u16 factor = float_to_half(fminf(most * (1.0f / 127.0f), 515.5f));
    const float f = half_to_float(factor);
    inverse = f > 0.0f ? 1.0f / f : 0.0f;
    return factor;
}
// Byte of a value: rounded to the nearest, ties to even, by an addition that leaves no bits below one.
__device__ __forceinline__ u32 byte_of(float x, float inverse) {
    return __float_as_uint(fminf(fmaxf(x * inverse, -127.0f), 127.0f) + (12582912.0f + 128.0f)) & 255;
}

__device__ __forceinline__ void store_head(const Plane& plane, u64 at, float2 a, float2 b) {
    const int lane = threadIdx.x & 31;
    float most[2] = {fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))}, inverse[2];
    u16* factors = plane.factors + at / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], lanes));
        const u16 factor = factor_of(most[i], inverse[i]);
        if ((lane & 15) == 0) factors[2 * i + (lane >> 4)] = factor;
    }
    u16* to = (u16*)(plane.at + at);
    to[lane] = byte_of(a.x, inverse[0]) | byte_of(a.y, inverse[0]) << 8;
    to[32 + lane] = byte_of(b.x, inverse[1]) | byte_of(b.y, inverse[1]) << 8;
}

// Two halves 1024 + byte to values.
__device__ __forceinline__ u32 values2(u32 biased, u32 factor2) { return hmul2(hadd2(biased, 0xe480e480u), factor2); }
__device__ __forceinline__ uint4 values8(uint2 w, u16 factor) {
    const u32 f = twice_low(factor);
    return make_uint4(values2(__byte_perm(w.x, BIASED, 0x4140), f), values2(__byte_perm(w.x, BIASED, 0x4342), f), values2(__byte_perm(w.y, BIASED, 0x4140), f),
                      values2(__byte_perm(w.y, BIASED, 0x4342), f));
}

template <int N>
__device__ __forceinline__ void read_pieces(uint4* to, const Plane& plane, u64 at) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = values8(*(const uint2*)(plane.at + at + 8 * i), plane.factors[(at + 8 * i) / 32]);
}

// Eight lanes hold a vector, elements 32i + 4 * eighth .. + 3: makes bytes of those; returns the four factors, to all lanes.
__device__ __forceinline__ uint2 quantise(const float4 x[4], u32 bytes[4]) {
    u32 factors[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float most = fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))), inverse;
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
        factors[i >> 1] |= (u32)factor_of(most, inverse) << (i & 1) * 16;
        bytes[i] = byte_of(x[i].x, inverse) | byte_of(x[i].y, inverse) << 8 | byte_of(x[i].z, inverse) << 16 | byte_of(x[i].w, inverse) << 24;
    }
    return make_uint2(factors[0], factors[1]);
}

// A lane's part of 16 keys: of keys g and 8 + g pieces of eight bytes, piece 4i + t in the i-th pair of words; factors of keys 2t, 2t + 1,
// 2t + 8 and 2t + 9.
struct ChunkKeys {
    uint4 w[2][2];
    uint2 factors[2][2];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            w[i >> 1][i & 1] = make_uint4(0, 0, 0, 0);
            factors[i >> 1][i & 1] = make_uint2(0, 0);
        }
    }
    __device__ __forceinline__ void read(int tile, const u8* key, int t) {
        const uint2* from = (const uint2*)key + t;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint2 a = from[8 * i], b = from[8 * i + 4];
            w[tile][i] = make_uint4(a.x, a.y, b.x, b.y);
        }
    }
    // Tensor cores take a byte b as the half of these bits, b * 2^-24, of which 128 * 2^-24 is too much.
    __device__ __forceinline__ void multiply(const u32 queries[8][4], float out[2][1][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 *even = queries[2 * i], *odd = queries[2 * i + 1], less = 0x80808080u;   // twice -128 * 2^-24
            float c[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
            mma(c[0], even[0], even[1], even[2], even[3], less, less);
            mma(c[0], odd[0], odd[1], odd[2], odd[3], less, less);
#pragma unroll
            for (int j = 0; j < 4; ++j) c[1][j] = c[0][j];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const uint4 four = w[tile][i >> 1];
                const u32 x = i & 1 ? four.z : four.x, y = i & 1 ? four.w : four.y;
                mma(c[tile], even[0], even[1], even[2], even[3], __byte_perm(x, 0, 0x4140), __byte_perm(x, 0, 0x4342));
                mma(c[tile], odd[0], odd[1], odd[2], odd[3], __byte_perm(y, 0, 0x4140), __byte_perm(y, 0, 0x4342));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint2 both = factors[tile][j & 1];
                    const float factor = half_to_float((u16)((i < 2 ? both.x : both.y) >> (i & 1) * 16));
                    out[tile][0][j] = i ? out[tile][0][j] + c[tile][j] * factor : c[tile][j] * factor;
                }
            }
        }
    }
};
#endif
