// Dequantises a matrix to f16, for a product on many rows.
// Layout: a thread takes two neighbouring columns; grid: (ceil(cols / 512), rows), 256 threads.
// Bytes: the weights read, two bytes a weight written. Operations: the block formula.
// Memory binds.
extern "C" __global__ void to_half(const u8* w, int type, u32 cols, float scale, u16* out) {
    allow_next();
    wait_previous();
    u32 i = (blockIdx.x * 256 + threadIdx.x) * 2;
    const u8* row = w + blockIdx.y * row_bytes(type, cols);
    if (i < cols) *(u32*)(out + (u64)blockIdx.y * cols + i) = floats_to_half2(weight(type, row, cols, i) * scale, weight(type, row, cols, i + 1) * scale);
}
