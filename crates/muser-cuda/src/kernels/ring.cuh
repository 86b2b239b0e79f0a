// Shares of kernels/chain.cu's products among warps, and the ring of tiles that each warp has on their way.
#define WARPS 16
#define THREADS (WARPS * 32)
// Bytes of a warp's ring: two rows of activations leave room for less.
#define RING (COLUMNS == 1 ? 10240 : 6912)

// Mirrors of the structs in chain.rs.
struct Piece {
    const u8* w;
    float* out;
    u64 plane;       // elements from plane to plane of out
    u32 rows, tiles;
    float scale;
    u32 pad;
};
struct Product {
    Piece piece[4];
    u32 cols, layout, blocks;   // blocks may be none
    u32 share, longer;          // tiles of a block; the first `longer` have one more
    u32 pad;
};
struct Tail {
    const float *post, *next, *before;   // post may be null; the residual before
    float *after, *features;             // and after; features may be null
    float post_eps, eps;
};
struct Chain {
    Product product[8];   // two a step: the second has its own layout, or no blocks
    Tail tail[2];
    const u16* attended;
    u16* f;
    const Row* rows;
    u32* arrived;         // counters of this launch, which the step's first kernel clears
    u32 feature_stride, xs_halves;   // xs_halves: of activations in shared memory, before their sums
    u32 kept, activated;  // elements of a row's residual that a block writes; of SiLU that it computes
    Masks masks;
};
#define STEPS 4
#define PLACE (16 * COLUMNS)   // sums of a row of tiles

extern __shared__ uint4 shared_bytes[];

// Places of a warp's ring. They are filled in stages: the first as soon as a product's list is done, those up to `early` once this block
// has told the others, the rest when all have: more at once would hold up what blocks tell each other.
template <int LAYOUT>
struct Slots {
    static constexpr int bytes = Kind<LAYOUT>::part_bytes, count = RING / bytes > 4 ? 4 : RING / bytes, early = count > 2 ? 2 : 1;
    static constexpr int from[4] = {0, 1, early, count};
};
__device__ __forceinline__ u32 parts_of(u32 layout) { return layout == F16 ? 4 : 1; }

// A warp's share of a product's tiles, and the tile that it fetches next.
struct alignas(16) Run {
    u32 product, from, to;
    u32 tile, begun;         // the row of tiles that `from` stands in, and what of it stands before
    u32 piece, left, rest;   // tiles of `piece` that are not fetched yet, and those of pieces after it
    const u8* p;             // the next; as `take` gives it, a lane's 16 bytes of it
    u32 last, others;        // the row of tiles that `to` stands in, with flags; warps whose parts are joined to `tile`'s, and to `last`'s
};
// Flags of `last`: the row `tile`, which another block began, is this warp's to join, and this block ends it; the same of the row `last`.
enum { CUT_FIRST = 1u << 28, FIRST_ENDS = 1u << 29, CUT_LAST = 1u << 30, LAST_ENDS = 1u << 31 };

__device__ __forceinline__ Run open_share(const Chain& c, u32 step) {
    Run r;
    const u32 warp = threadIdx.x >> 5, first = c.product[2 * step].blocks;
    const bool second = blockIdx.x >= first;
    const u32 block = blockIdx.x - (second ? first : 0);
    r.product = 2 * step + second;
    const Product& a = c.product[r.product];
    const u32 block_from = block * a.share + (block < a.longer ? block : a.longer), run = block >= a.blocks ? 0 : a.share + (block < a.longer);
    r.from = block_from + run * warp / WARPS;
    r.to = block_from + run * (warp + 1) / WARPS;
    r.tile = r.begun = r.piece = r.left = r.rest = r.last = r.others = 0;
    r.p = 0;
    if (r.from == r.to) return r;
    const u32 parts = (a.cols + 255) / 256 * parts_of(a.layout);
    r.tile = r.from / parts;
    r.begun = r.from - r.tile * parts;
    u32 local = r.tile;
    while (local >= a.piece[r.piece].tiles) local -= a.piece[r.piece++].tiles;
    const u32 before = local * parts + r.begun, here = a.piece[r.piece].tiles * parts - before, all = r.to - r.from;
    r.left = here < all ? here : all;
    r.rest = all - r.left;
    r.p = a.piece[r.piece].w + (u64)before * (tile_bytes(a.layout) / parts_of(a.layout));
    // Parts of a row of tiles stand in warps one after another; the one that has the first of this block adds them up.
    auto join = [&](u32 row_end, u32 ends, u32 shift) {
        u32 at = r.to;
        for (u32 other = warp + 1; other < WARPS && at < row_end; ++other) {
            const u32 other_to = block_from + run * (other + 1) / WARPS;
            if (other_to <= at) continue;
            at = other_to;
            r.others |= 1u << (other + shift);
        }
        return at >= row_end ? ends : 0;
    };
    const u32 row = r.from - r.begun, open = r.to / parts * parts;
    r.last = r.to / parts;
    if (r.from == block_from && r.begun > 0) r.last |= CUT_FIRST | join(row + parts, FIRST_ENDS, 0);
    if (open < r.to && open >= r.from) r.last |= CUT_LAST | join(open + parts, LAST_ENDS, 16);
    return r;
}

// A lane's 16 bytes of a tile, and what is added to their address: copies reach 2 KB to both sides of it without arithmetic.
#define AHEAD 1536
__device__ __forceinline__ const u8* mine(const u8* tile) { return tile + (threadIdx.x & 31) * 16 + AHEAD; }

// A share from shared memory, to fetch from.
__device__ __forceinline__ Run take(const Run& share) {
    Run r = share;
    r.p = mine(r.p);
    return r;
}

// Goes on by n tiles of this piece, and then to the next, if none of this is left.
__device__ __forceinline__ void advance(const Chain& c, Run& r, u32 n, u32 parts) {
    r.left -= n;
    if (r.left > 0 || r.rest == 0) return;
    const Piece& next = c.product[r.product].piece[++r.piece];
    const u32 here = next.tiles * parts;
    r.left = here < r.rest ? here : r.rest;
    r.rest -= r.left;
    r.p = mine(next.w);
}

// A lane's part of a tile to a place of the ring.
template <int LAYOUT>
__device__ __forceinline__ void copy_tile(u32 to, const u8* p) {
    constexpr int bytes = Slots<LAYOUT>::bytes, whole = bytes / 512 * 512;
    if (whole < bytes) copy16_if((threadIdx.x & 31) * 16 < bytes - whole, to + whole, p + whole - AHEAD);
#pragma unroll
    for (int o = 0; o < whole; o += 512) copy16(to + o, p + o - AHEAD);
}

// One stage of the ring's places.
template <int LAYOUT, int STAGE>
__device__ __forceinline__ void fill_places(const Chain& c, Run& r, u32 ring_at) {
    constexpr int from = Slots<LAYOUT>::from[STAGE], n = Slots<LAYOUT>::from[STAGE + 1] - from, bytes = Slots<LAYOUT>::bytes;
    const u32 parts = (c.product[r.product].cols + 255) / 256 * Kind<LAYOUT>::parts;
    // They stand one after another, but for those at a piece's end.
    if (n > 1 && r.left >= n) {
#pragma unroll
        for (int s = 0; s < n; ++s) {
            copy_tile<LAYOUT>(ring_at + (from + s) * bytes, r.p + s * bytes);
            commit();
        }
        r.p += n * bytes;
        return advance(c, r, n, parts);
    }
#pragma unroll 1
    for (int s = 0; s < n; ++s) {
        if (r.left > 0) {
            copy_tile<LAYOUT>(ring_at + (from + s) * bytes, r.p);
            r.p += bytes;
            advance(c, r, 1, parts);
        }
        commit();
    }
}
template <int STAGE>
__device__ __forceinline__ void fill(const Chain& c, Run& r, u32 ring_at) {
    const u32 layout = c.product[r.product].layout;
    if (layout == FIRST) fill_places<FIRST, STAGE>(c, r, ring_at);
#ifdef SECOND
    else fill_places<SECOND, STAGE>(c, r, ring_at);
#endif
}
