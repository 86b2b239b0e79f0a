// A card that is this machine's CPU: as much of the driver, NVRTC and cuBLAS as muser calls, in one library under their three names.
// NVRTC is g++; its "machine code" is a shared library. Memory of the card ends where a page does, so that what reads or writes behind
// it stops the program. A stream has done its work when a call returns; while it is captured, launches go into a graph.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#include <immintrin.h>

typedef uint64_t u64;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
typedef void (*Run)(unsigned, unsigned, unsigned, unsigned, unsigned, void**);
struct Function { Run run; const std::vector<size_t>* sizes; };   // bytes of each parameter
struct Module { void* library; std::map<std::string, Function> functions; };
struct Launch { const Function* f; unsigned grid[3], block, shared; std::vector<std::vector<char>> args; };
struct Graph { std::vector<Launch> launches; };
struct Config { unsigned grid[3], block[3], shared; void* stream; void* attrs; unsigned count; };

static Graph* capturing;
static std::mutex lock;
static std::map<u64, std::pair<char*, size_t>> areas;   // address: mapping
static size_t in_use;
static const size_t TOTAL = getenv("EMULATED_BYTES") ? strtoull(getenv("EMULATED_BYTES"), 0, 10) : 8ull << 30, PAGE = 4096;
static const int SHARED = getenv("EMULATED_SHARED") ? atoi(getenv("EMULATED_SHARED")) : 232448;

static void run(const Launch& l) {
    void* args[32];
    for (size_t i = 0; i < l.args.size(); ++i) args[i] = (void*)l.args[i].data();
    l.f->run(l.grid[0], l.grid[1], l.grid[2], l.block, l.shared, args);
}

extern "C" {
int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* v) { return *v = 12080, SUCCESS; }
int cuGetErrorName(int, const char** s) { return *s = "an error of the emulated card", SUCCESS; }
int cuGetErrorString(int e, const char** s) {
    return *s = e == OUT_OF_MEMORY ? "out of memory" : e == NOT_FOUND ? "not found" : "invalid value", SUCCESS;
}
int cuDeviceGet(int* d, int i) { return *d = i, i == 0 ? SUCCESS : 101; }
int cuDeviceGetCount(int* n) { return *n = 1, SUCCESS; }
int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "emulated card"), SUCCESS; }
int cuDeviceGetUuid_v2(void* u, int) { return memset(u, 0, 16), SUCCESS; }
int cuDeviceTotalMem_v2(size_t* n, int) { return *n = TOTAL, SUCCESS; }
int cuDeviceGetAttribute(int* v, int a, int) {
    // Multiprocessors, of which the tiny models' rows are no multiple; compute capability; shared memory of a block and a multiprocessor. No memory pools.
    *v = a == 16 ? 3 : a == 75 ? 9 : a == 76 ? 0 : a == 97 ? SHARED : a == 81 ? SHARED + 1024 : a == 36 ? 1000000 : a == 37 ? 512 : 0;
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** c, int) { return *c = (void*)&lock, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxGetCurrent(void** c) { return *c = (void*)&lock, SUCCESS; }
int cuCtxSetCurrent(void*) { return SUCCESS; }
int cuCtxSynchronize() { return SUCCESS; }
int cuStreamCreate(void** s, unsigned) { return *s = malloc(1), SUCCESS; }
int cuStreamDestroy_v2(void* s) { return free(s), SUCCESS; }
int cuStreamSynchronize(void*) { return SUCCESS; }
int cuStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
int cuEventCreate(void** e, unsigned) { return *e = new double(0), SUCCESS; }
int cuEventDestroy_v2(void* e) { return delete (double*)e, SUCCESS; }
int cuEventRecord(void* e, void*) {
    *(double*)e = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return SUCCESS;
}
int cuEventSynchronize(void*) { return SUCCESS; }
int cuEventQuery(void*) { return SUCCESS; }
int cuEventElapsedTime(float* ms, void* a, void* b) { return *ms = (float)(*(double*)b - *(double*)a), SUCCESS; }
int cuEventElapsedTime_v2(float* ms, void* a, void* b) { return cuEventElapsedTime(ms, a, b); }

int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = TOTAL - in_use, *total = TOTAL, SUCCESS; }
int cuMemAlloc_v2(u64* p, size_t bytes) {
    size_t body = (bytes + PAGE - 1) / PAGE * PAGE, all = body + PAGE;
    std::lock_guard guard(lock);
    if (in_use + body > TOTAL) return OUT_OF_MEMORY;
    char* at = (char*)mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || mprotect(at + body, PAGE, PROT_NONE)) return OUT_OF_MEMORY;
    memset(at, 0xff, body);
    // As close to the end as kernels' 16-byte accesses allow.
    *p = (u64)at + (body - (bytes + 15) / 16 * 16);
    areas[*p] = {at, all};
    in_use += body;
    return SUCCESS;
}
int cuMemFree_v2(u64 p) {
    std::lock_guard guard(lock);
    auto area = areas.find(p);
    if (area == areas.end()) return INVALID_VALUE;
    munmap(area->second.first, area->second.second);
    in_use -= area->second.second - PAGE;
    areas.erase(area);
    return SUCCESS;
}
int cuMemHostAlloc(void** p, size_t bytes, unsigned) { return *p = malloc(bytes), SUCCESS; }
int cuMemFreeHost(void* p) { return free(p), SUCCESS; }
int cuMemsetD8_v2(u64 p, unsigned char v, size_t n) { return memset((void*)p, v, n), SUCCESS; }
int cuMemsetD8Async(u64 p, unsigned char v, size_t n, void*) { return cuMemsetD8_v2(p, v, n); }
int cuMemcpyHtoD_v2(u64 to, const void* from, size_t n) { return memcpy((void*)to, from, n), SUCCESS; }
int cuMemcpyDtoH_v2(void* to, u64 from, size_t n) { return memcpy(to, (const void*)from, n), SUCCESS; }
int cuMemcpyDtoD_v2(u64 to, u64 from, size_t n) { return memmove((void*)to, (const void*)from, n), SUCCESS; }
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t n, void*) { return cuMemcpyHtoD_v2(to, from, n); }
int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t n, void*) { return cuMemcpyDtoH_v2(to, from, n); }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t n, void*) { return cuMemcpyDtoD_v2(to, from, n); }

int cuModuleLoadData(void** module, const void* image) {
    // The image is its size and a shared library: see nvrtcCompileProgram.
    u64 bytes;
    memcpy(&bytes, image, 8);
    char path[] = "/tmp/muser-emulated-XXXXXX";
    int file = mkstemp(path);
    bool written = write(file, (const char*)image + 8, bytes) == (ssize_t)bytes;
    close(file);
    void* library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), INVALID_VALUE;
    return *module = new Module{library, {}}, SUCCESS;
}
int cuModuleGetFunction(void** f, void* module, const char* name) {
    auto* m = (Module*)module;
    auto symbol = [&](const char* what) { return dlsym(m->library, (std::string(what) + name).c_str()); };
    Function found{(Run)symbol("run_"), (const std::vector<size_t>*)symbol("sizes_")};
    if (!found.run || !found.sizes) return NOT_FOUND;
    return *f = &(m->functions[name] = found), SUCCESS;
}
int cuModuleUnload(void* module) { return delete (Module*)module, SUCCESS; }   // the library stays: a thread of it may be there
int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
int cuLaunchKernelEx(const Config* c, void* function, void** params, void**) {
    const Function* f = (const Function*)function;
    Launch l{f, {c->grid[0], c->grid[1], c->grid[2]}, c->block[0], c->shared, {}};
    if (!l.grid[0] || !l.grid[1] || !l.grid[2] || l.grid[1] > 65535 || l.grid[2] > 65535 || !l.block || l.block > 1024 || l.shared > (unsigned)SHARED) return INVALID_VALUE;
    for (size_t i = 0; i < f->sizes->size(); ++i) l.args.emplace_back((char*)params[i], (char*)params[i] + (*f->sizes)[i]);
    if (capturing) capturing->launches.push_back(l);
    else run(l);
    return SUCCESS;
}
int cuStreamBeginCapture_v2(void*, int) { return capturing = new Graph, SUCCESS; }
int cuStreamEndCapture(void*, void** graph) { return *graph = capturing, capturing = nullptr, SUCCESS; }
int cuStreamIsCapturing(void*, int* status) { return *status = capturing ? 1 : 0, SUCCESS; }
int cuGraphInstantiateWithFlags(void** exec, void* graph, u64) { return *exec = graph, SUCCESS; }
int cuGraphUpload(void*, void*) { return SUCCESS; }
int cuGraphLaunch(void* exec, void*) {
    for (auto& l : ((Graph*)exec)->launches) run(l);
    return SUCCESS;
}
int cuGraphExecDestroy(void*) { return SUCCESS; }
int cuGraphDestroy(void* graph) { return delete (Graph*)graph, SUCCESS; }

struct Program { std::string text, log, code; };
int nvrtcVersion(int* major, int* minor) { return *major = 0, *minor = EMULATOR, SUCCESS; }
int nvrtcCreateProgram(void** p, const char* text, const char*, int, const char**, const char**) { return *p = new Program{text, "", ""}, SUCCESS; }
int nvrtcDestroyProgram(void** p) { return delete (Program*)*p, SUCCESS; }
int nvrtcCompileProgram(void* program, int, const char**) {
    auto& p = *(Program*)program;
    auto replace = [&](const std::string& from, const std::string& to, const std::string& with) {
        size_t a = p.text.find(from), b = a == std::string::npos ? a : to.empty() ? a + from.size() : p.text.find(to, a);
        if (b != std::string::npos) p.text.replace(a, b - a, with);
    };
    // ptx.cuh, up to common.cuh.
    replace("// Scalar types, and everything that is written in PTX", "// What every kernel shares", "#include \"ptx.h\"\n");
    replace("extern __shared__ uint4 shared_bytes[];", "", "#define shared_bytes ((uint4*)shared_memory)");
    std::string kernels;
    for (size_t at = 0; (at = p.text.find("extern \"C\" __global__", at)) != std::string::npos; ++at) {
        size_t open = p.text.find("(", p.text.find("void", at));
        if (p.text.compare(open - 17, 17, "__launch_bounds__") == 0) open = p.text.find("(", p.text.find(") ", open));
        size_t first = p.text.rfind(' ', open) + 1;
        kernels += "EXPORT(" + p.text.substr(first, open - first) + ")\n";
    }
    char folder[] = "/tmp/muser-emulator-XXXXXX";
    if (!mkdtemp(folder)) return INVALID_VALUE;
    std::string base = std::string(folder) + "/kernel";
    std::ofstream(base + ".cpp") << "#include \"cuda.h\"\n" << p.text << "\n" << kernels;
    std::string command = GXX " -shared " + base + ".cpp -o " + base + ".so > " + base + ".log 2>&1";
    int failed = system(command.c_str());
    auto read = [](const std::string& path) {
        std::ifstream in(path, std::ios::binary);
        return std::string(std::istreambuf_iterator<char>(in), {});
    };
    p.log = read(base + ".log");
    std::string library = read(base + ".so");
    system(("rm -r " + std::string(folder)).c_str());
    if (failed) return 6;
    u64 bytes = library.size();
    p.code = std::string((char*)&bytes, 8) + library;
    return SUCCESS;
}
int nvrtcGetProgramLogSize(void* p, size_t* n) { return *n = ((Program*)p)->log.size() + 1, SUCCESS; }
int nvrtcGetProgramLog(void* p, char* to) { return strcpy(to, ((Program*)p)->log.c_str()), SUCCESS; }
int nvrtcGetCUBINSize(void* p, size_t* n) { return *n = ((Program*)p)->code.size(), SUCCESS; }
int nvrtcGetCUBIN(void* p, char* to) { return memcpy(to, ((Program*)p)->code.data(), ((Program*)p)->code.size()), SUCCESS; }

int cublasCreate_v2(void** h) { return *h = malloc(1), SUCCESS; }
int cublasDestroy_v2(void* h) { return free(h), SUCCESS; }
int cublasSetStream_v2(void*, void*) { return SUCCESS; }
// c (m x n, f32 or f16) = factor * a (k x m, f16) transposed * b (k x n, f16), column by column.
int cublasGemmEx(void*, int ta, int tb, int m, int n, int k, const float* factor, const uint16_t* a, int, int lda, const uint16_t* b, int, int ldb,
                 const float* zero, void* c, int type, int ldc, int, int) {
    if (ta != 1 || tb != 0 || *zero != 0 || k % 8 || (type != 0 && type != 2)) return INVALID_VALUE;
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < m; ++i) {
            __m256 sum = _mm256_setzero_ps();
            for (int l = 0; l < k; l += 8)
                sum = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128((__m128i*)(a + (size_t)i * lda + l))), _mm256_cvtph_ps(_mm_loadu_si128((__m128i*)(b + (size_t)j * ldb + l))), sum);
            float parts[8], total = 0;
            _mm256_storeu_ps(parts, sum);
            for (float x : parts) total += x;
            size_t at = (size_t)j * ldc + i;
            if (type == 2) ((uint16_t*)c)[at] = _cvtss_sh(*factor * total, 0);
            else ((float*)c)[at] = *factor * total;
        }
    return SUCCESS;
}
}
