// A block as threads of the system: slow, but their races and accesses can be watched by the compiler's sanitizers.
#pragma once
#include <barrier>

#define __shared__ static
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static thread_local int parity;
struct Warp {
    std::barrier<> gate{32};
    u32 slot[2][32][12];
};
struct Block {
    std::vector<std::unique_ptr<Warp>> warps;
    std::barrier<> gate{THREADS};
};
static Block* the_block;
static u8* shared_memory;
static int my_lane() { return threadIdx.x & 31; }
inline void __syncthreads() { the_block->gate.arrive_and_wait(); }
inline void __syncwarp() { the_block->warps[threadIdx.x >> 5]->gate.arrive_and_wait(); }
// Where the lanes of this warp leave words for each other until the exchange after the next.
inline u32 (*exchange())[12] { return the_block->warps[threadIdx.x >> 5]->slot[parity ^= 1]; }

// Copies become visible when they are waited for, as late as the hardware may.
struct Copy { u8* to; const u8* from; int bytes; };
static thread_local std::deque<std::vector<Copy>> groups(1);
inline std::deque<std::vector<Copy>>& my_copies() { return groups; }

// Bulk copies of the block by the barrier that tells of them.
#include <map>
#include <mutex>
static std::mutex bulk_lock;
struct Bulk { Copy copy; u32 phase, arrivals, left; };
inline std::map<u32, Bulk>& bulk_copies() {
    static std::map<u32, Bulk> copies;
    return copies;
}
inline void let_others_run() { std::this_thread::yield(); }

// Runs a grid of blocks of THREADS threads, one block after another.
template <class Kernel>
void launch(unsigned gx, unsigned gy, unsigned shared, Kernel kernel) {
    std::vector<u8> memory(shared + 64);
    shared_memory = (u8*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    for (unsigned y = 0; y < gy; ++y)
        for (unsigned x = 0; x < gx; ++x) {
            Block here;
            for (int i = 0; i < THREADS / 32; ++i) here.warps.push_back(std::make_unique<Warp>());
            the_block = &here;
            std::vector<std::thread> all;
            for (unsigned i = 0; i < THREADS; ++i)
                all.emplace_back([=] {
                    threadIdx = {i, 0, 0};
                    blockIdx = {x, y, 0};
                    blockDim = {THREADS, 1, 1};
                    gridDim = {gx, gy, 1};
                    kernel();
                });
            for (auto& t : all) t.join();
        }
}
