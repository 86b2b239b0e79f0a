// Scalar types, and everything that is written in PTX: scripts/emulate/ptx.h has the same functions in C++.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
// Rounds to nearest even; what is beyond f16 becomes its largest value.
__device__ __forceinline__ u16 float_to_half(float f) {
    u16 h;
    f = fminf(fmaxf(f, -65504.0f), 65504.0f);
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// The same without that bound.
__device__ __forceinline__ u16 round_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// Two floats that no f16 is too small for, as halves.
__device__ __forceinline__ u32 small_half2(float lo, float hi) {
    u32 h;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(hi), "f"(lo));
    return h;
}

// Programmatic dependent launch: the next kernel may start; wait until the kernels before are complete.
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A value that the compiler keeps in its register instead of computing it again.
__device__ __forceinline__ u32 keep(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

// Two halves in a register.
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 hmul2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 hadd2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// (a & b) | c as the one instruction that it is, which compilers do not always find.
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// One of two halves twice; as a move, for operations on halves can read one of their operands so.
__device__ __forceinline__ u32 twice_low(u32 a) {
    u32 d;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tmov.b32 %0, {low, low};\n\t}" : "=r"(d) : "r"(a));
    return d;
}
__device__ __forceinline__ u32 twice_high(u32 a) {
    u32 d;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tmov.b32 %0, {high, high};\n\t}" : "=r"(d) : "r"(a));
    return d;
}

// c (16 x 8, f32) += a (16 x 16, f16) * b (16 x 8, f16).
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of four warps at once, each with 16 rows of a, on sm_90: b (16 x 16) lies in shared memory as matrices of 8 x 8, WIDE_K bytes from one
// to the next along its columns and WIDE_N along its rows, at what `wide_at` makes of an address, in which 16 bytes are one. Products go on
// while the warps do. `wide_begin` comes between writing registers and products that read them, `wide_end` behind the last of them; after
// `wide_done` their registers may be written again.
template <int WIDE_K>
__device__ __forceinline__ u32 wide_at(u32 at) { return __shfl_sync(0xffffffffu, at >> 4 | (WIDE_K >> 4) << 16, 0); }   // compilers know then that it is a warp's
__device__ __forceinline__ void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int WIDE_N>
__device__ __forceinline__ void wide_mma(float c[2][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    asm volatile("{\n\t.reg .b64 b;\n\tmov.b64 b, {%12, %13};\n\twgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, b, 1, 1, 1, 0;\n\t}"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "n"(WIDE_N >> 4));
}
// For 32, 64 and 128 rows of activations, 128 bytes from eight of them to the next.
__device__ __forceinline__ void wide_rows(float (&c)[4][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    asm volatile("{\n\t.reg .b64 b;\n\tmov.b64 b, {%20, %21};\n\twgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, b, 1, 1, 1, 0;\n\t}"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "n"(128 >> 4));
}
template <int HIGH = (128 >> 4)>
__device__ __forceinline__ void wide_rows(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    asm volatile("{\n\t.reg .b64 b;\n\tmov.b64 b, {%36, %37};\n\twgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, b, 1, 1, 1, 0;\n\t}"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "n"(HIGH));
}
template <int HIGH = (128 >> 4), int ACROSS = 0>
__device__ __forceinline__ void wide_rows(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
    asm volatile("{\n\t.reg .b64 b;\n\tmov.b64 b, {%68, %69};\n\twgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, b, 1, 1, 1, %70;\n\t}"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]), "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]), "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]), "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "n"(HIGH), "n"(ACROSS));
}
// The same with b in lines of 128 bytes, of whose eight pieces piece i of line l stands at i ^ (l & 7), from a multiple of 1,024 bytes on: `wide_lines`, its
// columns in lines, two bytes after each other, 8,192 bytes from 64 to the next; `wide_across`, its 16 rows in lines, WIDE_K bytes from 64 columns to the next.
#define WIDE_LINES (1024 >> 4 | 1 << 30)
__device__ __forceinline__ void wide_lines(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) { wide_rows<WIDE_LINES>(c, a0, a1, a2, a3, b); }
__device__ __forceinline__ void wide_across(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) { wide_rows<WIDE_LINES, 1>(c, a0, a1, a2, a3, b); }
__device__ __forceinline__ void wide_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wide_done() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Copies of 16 bytes (or 8) to shared memory that go on while the thread does; with 128 bytes brought to the L2 cache at once, or without.
// The first is for what is read once: its policy evicts that before all else.
__device__ __forceinline__ void copy16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(0x12F0000000000000ull) : "memory");
}
// The same where `wanted` is not zero, without a branch.
__device__ __forceinline__ void copy16_if(u32 wanted, u32 to, const u8* from) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %0, 0;\n\t@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [%1], [%2], 16, %3;\n\t}" ::"r"(wanted), "r"(to), "l"(from), "l"(0x12F0000000000000ull) : "memory");
}
__device__ __forceinline__ void copy16_near(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy8_near(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
// Copies of many bytes that one thread begins (sm_90 and later); a barrier in shared memory, of eight bytes, tells when they are there. A barrier's
// phases, of which every second has the same parity, end with as many arrivals as it was opened for: a copy is one.
// `open_barriers` ends what begins one; then the block has to meet once.
#if __CUDA_ARCH__ >= 900
#define BULK 1
__device__ __forceinline__ void open_barrier(u32 at, u32 arrivals = 1) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void open_barriers() { asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_bulk(u32 barrier, u32 parity = 0) {
    u32 there;
    do asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(there) : "r"(barrier), "r"(parity) : "memory");
    while (!there);
}
#else
#define BULK 0
__device__ __forceinline__ void open_barrier(u32) {}
__device__ __forceinline__ void open_barriers() {}
__device__ __forceinline__ void copy_bulk(u32, const void*, u32, u32) {}
__device__ __forceinline__ void wait_bulk(u32) {}
#endif
// What this thread wrote to shared memory, copies that have arrived too, may be read by products of warpgroups once others know of it.
__device__ __forceinline__ void show() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Ends a group of copies; waits until all but the last N groups are there.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Reads of shared memory by address. They may move, but not before the address is known: `keep` after a barrier holds them back.
__device__ __forceinline__ uint4 lds128(u32 at) {
    uint4 v;
    asm("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 lds64(u32 at) {
    uint2 v;
    asm("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ u32 lds32(u32 at) {
    u32 v;
    asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
// Four 8 x 8 matrices of 16-bit elements in shared memory, transposed: lane 8m + r names row r of matrix m, and gets elements 2t and
// 2t + 1 of column g of each.
__device__ __forceinline__ uint4 transposed(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 lds16(u32 at) {
    u16 v;
    asm("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

// What other blocks of this kernel wrote: never from the multiprocessor's own cache.
__device__ __forceinline__ uint4 load_far(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
// A counter by which blocks wait for each other; what this thread has seen written is seen by who reads the new count.
__device__ __forceinline__ void count_up(u32* counter) { asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ __forceinline__ u32 load_count(const u32* counter) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    return v;
}
__device__ __forceinline__ void stand_by() {}

// Powers of two, as the multiprocessor's special function gives them.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
