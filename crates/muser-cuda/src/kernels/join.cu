// What stands before and behind kernels/stream_wide.cu and, of the second, kernels/stream.cu.

// Eight columns of a row of activations to where warpgroups' products read them (Activation in common.cuh): of each 256 columns 34 matrices of 8 by 8 for
// all `octets` of rows, of the first half 16, then sums of the eight groups and what these lack, then 16 of the second half. A block of 256 threads has
// 256 columns of eight rows: a warp is a step of a half, a lane 8 columns of a row.
__device__ __forceinline__ u32 row_of_lane() { return (threadIdx.x & 31) >> 2; }
__device__ __forceinline__ u32 columns_of_lane() { return (threadIdx.x >> 7) * 128 + (threadIdx.x & 3) * 32 + ((threadIdx.x >> 5) & 3) * 8; }
__device__ __forceinline__ void put_wide(u16* out, u32 octets, u32 octet, u32 block, uint4 v, float sums[8][32]) {
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = warp >> 2, step = warp & 3, matrix = octets * 64;
    u16* const to = out + block * 34 * matrix + octet * 64;
    u32* const here = (u32*)(to + (half * 18 + step * 4) * matrix) + lane;
    here[0] = v.x;
    here[matrix / 2] = v.y;
    here[2 * (matrix / 2)] = v.z;
    here[3 * (matrix / 2)] = v.w;
    sums[warp][lane] = sum_halves(make_uint2(v.x, v.y)) + sum_halves(make_uint2(v.z, v.w));
    __syncthreads();
    if (step > 0) return;
    // Of the eight groups those of this half.
    const float sum = (sums[warp][lane] + sums[warp + 1][lane]) + (sums[warp + 2][lane] + sums[warp + 3][lane]);
    u16* const at = to + 16 * matrix + (lane >> 2) * 8 + half * 4 + (lane & 3);
    at[0] = float_to_half(sum);
    at[matrix] = float_to_half(sum - half_to_float(at[0]));
}

// Rows of activations so. What is behind row n and column cols is zero. grid: (octets, cols / 256), 256 threads.
extern "C" __global__ void __launch_bounds__(256) arrange(const u16* x, u32 n, u32 cols, u16* out) {
    __shared__ float sums[8][32];
    allow_next();
    const u32 row = blockIdx.x * 8 + row_of_lane(), column = blockIdx.y * 256 + columns_of_lane();
    wait_previous();
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < n && column < cols) v = *(const uint4*)(x + (u64)row * cols + column);
    put_wide(out, gridDim.x, blockIdx.x, blockIdx.y, v, sums);
}

// Planes among which the steps of a block's rows were cut.
__device__ __forceinline__ u32 pieces_of(const Stream& a, u32 block) { return owner(a, (block + 1) * a.steps - 1) - owner(a, block * a.steps) + 1; }
// The sum of `pieces` planes, two of which are on their way at once.
__device__ __forceinline__ float4 sum_pieces(const float* from, u32 pieces, u64 plane) {
    float4 v = *(const float4*)from;
    if (pieces > 1) v = add4(v, *(const float4*)(from + plane));
#pragma unroll 2
    for (u32 i = 2; i < pieces; ++i) v = add4(v, *(const float4*)(from + i * plane));
    return v;
}

// Adds up the planes; results are f16 or, where `halves` is null, f32. grid: (n / 4, blocks), 256 threads: four rows, of each four values a thread.
extern "C" __global__ void __launch_bounds__(256) join(const Stream a, const float* planes, u64 stride, u16* halves, float* floats) {
    allow_next();
    u32 block = blockIdx.y;
    const u32 pieces = pieces_of(a, block), width = a.blocks * 256, quad = (threadIdx.x & 63) * 4, x_row = blockIdx.x * 4 + (threadIdx.x >> 6);
    if (x_row >= a.n) return;
    const float* from = planes + (u64)x_row * width + block * 256 + quad;
    const Part& p = part_of(a, block);
    const u32 row = block * 256 + quad;
    const u64 at = x_row * stride + p.before + row;
    wait_previous();
    const float4 v = scale4(sum_pieces(from, pieces, (u64)a.n * width), p.scale);
    if (row + 3 < p.rows && at % 4 == 0) {
        if (halves) *(uint2*)(halves + at) = make_uint2(floats_to_half2(v.x, v.y), floats_to_half2(v.z, v.w));
        else *(float4*)(floats + at) = v;
        return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (row + i >= p.rows) break;
        if (halves) halves[at + i] = float_to_half(values[i]);
        else floats[at + i] = values[i];
    }
}

// The same of two matrices, gate and up: silu(gate) * up, as rows and as a product takes them. grid: (octets, blocks of one), 256 threads: four values
// of two rows each, then, from shared memory, eight of one.
extern "C" __global__ void __launch_bounds__(256) join_silu(const Stream a, const float* planes, u16* out, u16* arranged) {
    __shared__ float sums[8][32];
    __shared__ uint4 values[8][33];
    allow_next();
    const u32 width = a.blocks * 256, n = a.part[0].rows, column = blockIdx.y * 256 + (threadIdx.x & 63) * 4;
    const u64 plane = (u64)a.n * width;
    const u32 pieces[2] = {pieces_of(a, blockIdx.y), pieces_of(a, blockIdx.y + a.part[0].blocks)};
    wait_previous();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 row = (threadIdx.x >> 6) + 4 * i, x_row = blockIdx.x * 8 + row;
        uint2 w = make_uint2(0, 0);
        if (x_row < a.n && column < n) {
            const float* from = planes + (u64)x_row * width + column;
            const float4 x = scale4(sum_pieces(from, pieces[0], plane), a.part[0].scale);
            const float4 y = scale4(sum_pieces(from + a.part[0].blocks * 256, pieces[1], plane), a.part[1].scale);
            w.x = floats_to_half2(x.x / (1.0f + __expf(-x.x)) * y.x, x.y / (1.0f + __expf(-x.y)) * y.y);
            w.y = floats_to_half2(x.z / (1.0f + __expf(-x.z)) * y.z, x.w / (1.0f + __expf(-x.w)) * y.w);
            *(uint2*)(out + (u64)x_row * n + column) = w;
        }
        ((uint2*)values[row])[threadIdx.x & 63] = w;
    }
    __syncthreads();
    put_wide(arranged, gridDim.x, blockIdx.x, blockIdx.y, values[row_of_lane()][columns_of_lane() / 8], sums);
}
