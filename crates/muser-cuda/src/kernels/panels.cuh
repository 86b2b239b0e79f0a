// Weights of the strict lane on the card.
// A panel is four rows, cut into tiles of 256 columns (128 of two bytes, 64 of four). A thread of the warp that takes one or two panels
// has a row p of each, and of every 32 columns the four 4q .. 4q + 3: the contract's sums 4q + e of that row, for thread 8p + q. So a
// scale that is read serves four weights.
//
// form        a tile: codes of a pair of 32 columns (64), four rows, eight q; then scales
// AS_F32      [32 columns][row][q] 4 floats
// AS_F16/BF16 [pair][row][q] 8 values
// AS_NIBBLE   [pair][row][q] a word: low nibbles are the first 32 columns', high ones the second's; [pair][row] scales of both
// AS_MIN      the same; [pair][row] scale and minimum of the first, then of the second
// AS_TABLE    a word: four nibbles of the first, four of the second, places in the table of IQ4; scales as AS_NIBBLE
// AS_FP4      the same with the values of E2M1, doubled; [pair][row][half of 32 columns] scales of both
// AS_BYTE     [pair][row][q] four bytes each; scales as AS_NIBBLE
// AS_FINE     the same; scales as AS_FP4
// AS_BYTE_MIN the same; scales as AS_MIN
// Scales stand 2^23 times too high: a code's bits below those of 1.0 are that much too low, and neither shift rounds.
// Columns beyond the matrix weigh -0.0, which changes no sum. In AS_MIN and AS_BYTE_MIN no scale has a sign; a matrix where one has is
// ..._SIGNED, so that a code of zero gives the zero that the reference has.
enum { AS_F32 = 0, AS_F16 = 1, AS_BF16 = 2, AS_NIBBLE = 3, AS_MIN = 4, AS_MIN_SIGNED = 5, AS_TABLE = 6, AS_FP4 = 7, AS_BYTE = 8, AS_FINE = 9, AS_BYTE_MIN = 10, AS_BYTE_MIN_SIGNED = 11 };

__device__ constexpr bool is_float(int form) { return form <= AS_BF16; }
__device__ constexpr bool is_byte(int form) { return form >= AS_BYTE; }
// A minimum, and no scale with a sign.
__device__ constexpr bool is_plain(int form) { return form == AS_MIN || form == AS_BYTE_MIN; }
__device__ constexpr bool has_min(int form) { return is_plain(form) || form == AS_MIN_SIGNED || form == AS_BYTE_MIN_SIGNED; }
__device__ constexpr bool is_fine(int form) { return form == AS_FP4 || form == AS_FINE; }
__device__ constexpr u32 pairs_of(int form) { return form == AS_F32 ? 1 : is_float(form) ? 2 : 4; }
__device__ constexpr u32 codes_of(int form) { return is_float(form) || is_byte(form) ? 1024 : 512; }
__device__ constexpr u32 tile_of(int form) { return codes_of(form) + (is_float(form) ? 0 : has_min(form) || is_fine(form) ? 256 : 128); }
__device__ __forceinline__ u32 tiles_of(int form, u32 cols) { return (cols + pairs_of(form) * 64 - 1) / (pairs_of(form) * 64); }
