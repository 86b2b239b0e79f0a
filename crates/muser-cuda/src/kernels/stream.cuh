// Products of many rows straight from the tiles: steps of 256 columns of all blocks of 16 rows of tiles are dealt out evenly, a run of them to each
// block of the launch. Mirrors of the structs in stream.rs.
struct Part {
    const u8* w;
    u32 tiles, rows, before, blocks;   // before: its first column of the result; blocks of 16 rows of tiles
    float scale;
    u32 pad;
};
struct Stream {
    Part part[4];
    u32 parts, blocks, steps, cols, n, grid;   // steps of a block's row; blocks of the launch
};

__device__ __forceinline__ const Part& part_of(const Stream& a, u32& block) {
    u32 s = 0;
    while (s + 1 < a.parts && block >= a.part[s].blocks) block -= a.part[s++].blocks;
    return a.part[s];
}
// The block of the launch that has step `at` of all. (32 bits are enough: a launch has some thousand steps and blocks.)
__device__ __forceinline__ u32 owner(const Stream& a, u32 at) { return ((at + 1) * a.grid - 1) / (a.blocks * a.steps); }
