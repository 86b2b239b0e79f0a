// Packs golden blocks, reads them back, widens them, multiplies them: kernels/layout.cuh, pack.cu and project.cu against the golden
// values. Arguments: blocks file, values file (f32), bytes a block, values a block.
#include <fstream>

static std::vector<u8> file(const char* name) {
    std::ifstream in(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}
static int failures = 0;
static void expect(bool ok, const char* what, double got, double want) {
    if (ok) return;
    if (++failures < 6) printf("%s: %g, and not %g\n", what, got, want);
}

int main(int, char** args) {
    std::vector<u8> raw = file(args[1]), bytes = file(args[2]);
    std::vector<float> values(bytes.size() / 4);
    memcpy(values.data(), bytes.data(), bytes.size());
    // Rows that are no whole number of tiles.
    const u32 cols = atoi(args[4]) == 256 ? 512 : atoi(args[4]) == 64 ? 192 : 96, rows = values.size() / cols;
    const u64 row_bytes = (u64)cols / atoi(args[4]) * atoi(args[3]);
    u32 bits = 0;
    const u64 count = SOURCE <= 2 ? values.size() : values.size() / atoi(args[4]);
    launch(2, 1, 0, [&] { if (threadIdx.x < 256) bound(raw.data(), count, &bits); });
    float most = __uint_as_float(bits), norm = exp2f(floorf((TYPE == F16 ? 14 : 5) - log2f(most)));
    const u32 tiles = (rows + 15) / 16, blocks = (cols + 255) / 256;
    std::vector<uint4> packed((size_t)tiles * blocks * tile_bytes(TYPE) / 16);
    launch((tiles * blocks * 128 + 255) / 256, 1, 0, [&] { if (threadIdx.x < 256) pack(raw.data(), row_bytes, rows, cols, &bits, TYPE == F16 ? 14 : 5, (u8*)packed.data()); });
    const u8* w = (const u8*)packed.data();
    for (u32 r = 0; r < rows; ++r)
        for (u32 c = 0; c < cols; ++c) {
            float got = weight(TYPE, w, cols, r, c) / norm, want = values[r * cols + c];
            expect(fabsf(got - want) <= 2e-3f * fabsf(want) + most * 1e-5f, "weight", got, want);
        }
    std::vector<uint4> wide((size_t)rows * cols / 8);
    launch((tiles * blocks * 128 + 255) / 256, 1, 0, [&] {
        if (threadIdx.x < 256) widen(w, rows, cols, 0x40004000, (u16*)wide.data());
        else __syncthreads();   // its only one
    });
    for (u32 i = 0; i < rows * cols; ++i) {
        float got = half_to_float(((u16*)wide.data())[i]) / norm / 2.0f;
        expect(fabsf(got - values[i]) <= 2e-3f * fabsf(values[i]) + most * 0.01f, "widen", got, values[i]);
    }
    srand(7);
    std::vector<uint4> x(16 * cols / 8);
    for (u32 i = 0; i < 16 * cols; ++i) ((u16*)x.data())[i] = float_to_half((float)(rand() % 2001 - 1000) / 700.0f);
    std::vector<uint4> tiled((size_t)blocks * GROUP_ROWS * GROUP_ROW / 8);
    const Activation to = {nullptr, nullptr, (u16*)tiled.data(), TEAM > 1};
    for (u32 row = 0; row < 16; ++row)
        for (u32 e = 0; e < cols; e += 32) {
            float sum = 0;
            for (u32 i = e; i < e + 32; ++i) sum += half_to_float(tile_row(to, row, i)[in_tile(to, i)] = ((u16*)x.data())[row * cols + i]);
            put_sum(to, row, e, sum);
        }
    // Rows of tiles of two segments, as teams have them.
    const u32 of_first = rows > 16 * TEAM ? 16 * TEAM : rows, teams_first = (of_first + 16 * TEAM - 1) / (16 * TEAM), teams = teams_first + (rows - of_first + 16 * TEAM - 1) / (16 * TEAM);
    for (int slices = 1; slices <= (blocks > 1 ? 2 : 1); ++slices)
        for (u32 grid = 1; grid <= (teams < 3 ? teams : 3); ++grid)
            for (int n = COLUMNS; n >= (COLUMNS + 1) / 2; n -= 3) {
                const u32 most_blocks = (blocks + slices - 1) / slices, planes = slices == 1 ? 2 : slices;
                const u32 fixed = WARPS * Kind<TYPE>::stages * Kind<TYPE>::part_bytes + WARPS * 1024 + 528;
                const u32 shared = COLUMNS > 2 ? fixed + most_blocks * (COLUMNS * GROUP_ROW * 2 + 8) : fixed + COLUMNS * (64 + 32) + most_blocks * COLUMNS * (512 + Kind<TYPE>::sum_bytes);
                std::vector<float> out((size_t)planes * n * rows, -1e30f);
                // Two segments when the rows allow it, or a product of its own for the second.
                Product a{}, side{};
                u32 first = of_first;
                a.seg[0] = {w, out.data(), (u64)n * rows, (int)first, (int)teams_first, (int)rows, 1.0f / norm};
                a.segments = 1;
                if (first < rows) {
                    u64 at = (u64)first / 16 * blocks * tile_bytes(TYPE);
                    Segment second = {w + at, out.data() + first, (u64)n * rows, (int)(rows - first), (int)(teams - teams_first), (int)rows, 1.0f / norm};
                    if (grid == 2) side.seg[0] = second, side.segments = 1, side.tiles = teams - teams_first;
                    else a.seg[1] = second, a.segments = 2;
                }
                for (Product* p : {&a, &side}) p->cols = cols, p->n = n, p->slices = slices, p->masks = {0x000f000f, 0x00f000f0};
                a.tiles = teams - side.tiles;
                a.blocks = grid - side.segments;
                side.blocks = side.segments;
                // Of three blocks one starts late, and has one row of tiles.
                u32 ticket = 0;
                const bool numbered = COLUMNS > 2 && grid == 3;
                if (numbered) a.late = 1, a.less = slices == 1 ? blocks * Kind<TYPE>::parts : 1;
                launch(grid, slices, shared, [&] { project(a, side, numbered ? &ticket : nullptr, (const u16*)(COLUMNS > 2 ? tiled : x).data(), cols); });
                for (int c = 0; c < n; ++c)
                    for (u32 r = 0; r < rows; ++r) {
                        double want = 0, size = 0, got = 0;
                        for (u32 i = 0; i < cols; ++i) {
                            double v = (double)values[r * cols + i] * half_to_float(((u16*)x.data())[c * cols + i]);
                            want += v;
                            size += fabs(v);
                        }
                        for (u32 p = 0; p < planes; ++p) got += out[((u64)p * n + c) * rows + r];
                        expect(fabs(got - want) <= 1.5e-3 * size + most * 1e-3, "product", got, want);
                    }
            }
    printf("type %d, %d columns, %d warps a team: %u x %u, %d failures\n", TYPE, COLUMNS, TEAM, rows, cols, failures);
    return failures != 0;
}
