// A block as fibers of one thread, for whole models: a fiber runs until it has to wait for others of its warp or block. x86-64 only.
#pragma once
#include <sys/mman.h>

#define __shared__ static thread_local
struct Copy { u8* to; const u8* from; int bytes; };
struct Gate { unsigned arrived = 0, passed = 0; };
struct Fiber {
    void* stack_at;
    Index thread;
    int parity;
    Gate* waits;          // for this gate to be passed, or null
    unsigned passed;      // what it had been
    bool done;
    std::deque<std::vector<Copy>> copies;
};
struct Warp {
    u32 slot[2][32][12];
    Gate gate;
    unsigned live, at_block;
};
struct Block {
    Index index, threads, grid;
    unsigned shared;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Gate gate;
    unsigned live;
    void (*kernel)(void**);
    void** args;
    void* scheduler;
};
static thread_local Block* the_block;
static thread_local Fiber* the_fiber;
alignas(128) static thread_local u8 shared_memory[232448];
#define threadIdx (the_fiber->thread)
#define blockIdx (the_block->index)
#define blockDim (the_block->threads)
#define gridDim (the_block->grid)

// Saves what a call must preserve on this stack, and goes on with another.
extern "C" void switch_stack(void** from, void* to);
asm(".text\n.local switch_stack\n.type switch_stack,@function\nswitch_stack:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static int my_lane() { return threadIdx.x & 31; }
static Warp& my_warp() { return the_block->warps[threadIdx.x >> 5]; }
inline void pass(Gate& gate) {
    gate.arrived = 0;
    gate.passed += 1;
    if (&gate == &the_block->gate)
        for (auto& warp : the_block->warps) warp.at_block = 0;
}
static void wait(Gate& gate, unsigned all) {
    if (++gate.arrived == all) return pass(gate);
    the_fiber->waits = &gate;
    the_fiber->passed = gate.passed;
    switch_stack(&the_fiber->stack_at, the_block->scheduler);
}
inline void __syncwarp() { wait(my_warp().gate, my_warp().live); }
inline void __syncthreads() {
    my_warp().at_block += 1;
    wait(the_block->gate, the_block->live);
}
// Where the lanes of this warp leave words for each other until the exchange after the next.
inline u32 (*exchange())[12] { return my_warp().slot[the_fiber->parity ^= 1]; }
inline std::deque<std::vector<Copy>>& my_copies() { return the_fiber->copies; }

// Bulk copies of the block by the barrier that tells of them; only its fibers see them.
#include <map>
struct NoLock {
    void lock() {}
    void unlock() {}
};
static NoLock bulk_lock;
struct Bulk { Copy copy; u32 phase, arrivals, left; };
inline std::map<u32, Bulk>& bulk_copies() {
    static thread_local std::map<u32, Bulk> copies;
    return copies;
}
// Goes on after the other fibers had their turn.
inline void let_others_run() {
    the_fiber->waits = nullptr;
    switch_stack(&the_fiber->stack_at, the_block->scheduler);
}

static void fiber_main() {
    the_block->kernel(the_block->args);
    Warp& warp = my_warp();
    the_fiber->done = true;
    warp.live -= 1;
    the_block->live -= 1;
    // Who has returned is waited for no longer.
    if (warp.live && warp.gate.arrived == warp.live) pass(warp.gate);
    if (the_block->live && the_block->gate.arrived == the_block->live) pass(the_block->gate);
    switch_stack(&the_fiber->stack_at, the_block->scheduler);
    abort();
}

// Their hot ends stand in different sets of the caches: without that a kernel takes twice as long.
const size_t STACK = 32 << 10, STAGGER = 576;
static void run_block(Block& b, u8* stacks, unsigned first) {
    the_block = &b;
    unsigned count = b.threads.x;
    b.live = count;
    b.gate = {};
    b.warps.assign((count + 31) / 32, {});
    b.fibers.resize(count);
    memset(shared_memory, 0xff, b.shared);   // not a number, whoever reads before writing
    for (unsigned i = 0; i < count; ++i) {
        b.warps[i / 32].live += 1;
        void** top = (void**)(stacks + (i + 1) * STACK - i * STAGGER % 8192) - 8;
        top[6] = (void*)fiber_main;   // where the first switch returns to; its caller's address, 0, is above
        top[7] = nullptr;
        Fiber& f = b.fibers[i];
        f.stack_at = top;
        f.thread = {i, 0, 0};
        f.waits = nullptr;
        f.done = false;
        f.copies.resize(1);
    }
    // Warps in turn, from another one in each block; a round without progress would be one for ever.
    unsigned warps = b.warps.size(), idle = 0;
    for (unsigned w = first % warps; b.live; w = (w + 1) % warps) {
        bool ran = false;
        if (b.warps[w].at_block < b.warps[w].live) {
            for (unsigned i = w * 32; i < count && i < w * 32 + 32; ++i) {
                Fiber& f = b.fibers[i];
                if (f.done || (f.waits && f.waits->passed == f.passed)) continue;
                f.waits = nullptr;
                the_fiber = &f;
                switch_stack(&b.scheduler, f.stack_at);
                ran = true;
            }
        }
        idle = ran ? 0 : idle + 1;
        if (idle > warps) {
            for (unsigned i = 0; i < warps; ++i) fprintf(stderr, "warp %u: live %u at_block %u arrived %u\n", i, b.warps[i].live, b.warps[i].at_block, b.warps[i].gate.arrived);
            fprintf(stderr, "a block waits for threads that never come: %u of %u, live %u, gate %u\n", b.index.x, b.grid.x, b.live, b.gate.arrived);
            abort();
        }
    }
}

// A second thread of the system that works on every launch.
struct Helper {
    std::function<void()> work;
    std::atomic<unsigned> begun = 0, ended = 0;
    std::thread thread{[this] {
        for (unsigned n = 0;; ++n) {
            begun.wait(n);
            work();
            ended = n + 1;
            ended.notify_one();
        }
    }};
    Helper() { thread.detach(); }
    void start(std::function<void()> w) {
        work = w;
        begun += 1;
        begun.notify_one();
    }
    void finish() {
        for (unsigned n; (n = ended) != begun;) ended.wait(n);
    }
};

// Runs a grid of blocks on two processors; so few that they may wait for each other (kernels/chain.cu) all at once.
static void launch(Index grid, unsigned threads, unsigned shared, void (*kernel)(void**), void** args) {
    if (shared > sizeof shared_memory || threads > 1024) {
        fprintf(stderr, "a launch of %u threads with %u bytes of shared memory\n", threads, shared);
        abort();
    }
    std::atomic<unsigned> next = 0;
    unsigned all = grid.x * grid.y * grid.z;
    auto work = [&] {
        // Kept from launch to launch, for pages of stacks are dear.
        static thread_local struct Stacks {
            u8* at = (u8*)mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            ~Stacks() { munmap(at, 1024 * STACK); }
        } stacks;
        static thread_local Block b;
        b.threads = {threads, 1, 1};
        b.grid = grid;
        b.shared = shared;
        b.kernel = kernel;
        b.args = args;
        for (unsigned i; (i = next++) < all;) {
            b.index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
            run_block(b, stacks.at, i * 7);
        }
    };
    static Helper helpers[3];
    unsigned more = all > 4 ? 1 : all - 1;
    for (unsigned i = 0; i < more; ++i) helpers[i].start(work);
    work();
    for (unsigned i = 0; i < more; ++i) helpers[i].finish();
}

// A kernel with its parameters taken from where a launch says they are.
template <class T>
T read(const void* from) {
    std::remove_const_t<T> value;
    memcpy((void*)&value, from, sizeof value);
    return value;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) { kernel(read<A>(args[I])...); }
template <auto KERNEL>
struct Caller;
template <class... A, void (*KERNEL)(A...)>
struct Caller<KERNEL> {
    static void run(void** args) { call(KERNEL, args, std::index_sequence_for<A...>()); }
    static std::vector<size_t> sizes() { return {sizeof(A)...}; }
};
#define EXPORT(name) \
    extern "C" void run_##name(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared, void** args) { \
        launch({x, y, z}, threads, shared, Caller<name>::run, args); \
    } \
    extern "C" const std::vector<size_t> sizes_##name = Caller<name>::sizes();
