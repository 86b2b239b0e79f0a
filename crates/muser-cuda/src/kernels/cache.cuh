// What kernels of attention in both lanes share: caches, and what a row sees of them.
// Layout: K and V of a cache are token-major rows of f16 (in kv.cuh also of bytes); position p stands in row p % capacity.
struct Cache {
    u64 k, v;   // per slot: tables of base addresses
    u32 capacity, window, kv_heads, width;   // window 0: none
};
#define HD 128
// Floats that a part of a row's keys leaves in the serving lane: values of the (up to 16) heads of a KV head, then (max, sum) of each.
#define PART (16 * HD + 32)

__device__ __forceinline__ u32 row_of(const Cache& c, u32 pos) { return c.window ? pos % c.capacity : pos; }

// Keys first..last (exclusive) of a row.
__device__ __forceinline__ void visible(const Row& row, const Cache& cache, int block, u32& first, u32& last) {
    first = cache.window && row.pos + 1 > cache.window ? row.pos + 1 - cache.window : 0;
    last = (block ? row.end : row.pos) + 1;
}

__device__ __forceinline__ u32 pack_low(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 pack_high(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
