// Reads memory once, as fast as it goes: the limit that other kernels are held against.
// Layout: 16 bytes a lane, four on the way. grid: any, 256 threads.
extern "C" __global__ void __launch_bounds__(256) read_all(const uint4* p, u64 n, u32* out) {
    uint4 sum = make_uint4(0, 0, 0, 0);
    const u64 step = (u64)gridDim.x * 256;
#pragma unroll 4
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < n; i += step) {
        uint4 v = p[i];
        sum = make_uint4(sum.x ^ v.x, sum.y ^ v.y, sum.z ^ v.z, sum.w ^ v.w);
    }
    // Never true for zeroed memory; keeps the reads.
    if ((sum.x | sum.y | sum.z | sum.w) == 0xffffffffu) *out = sum.x;
}
