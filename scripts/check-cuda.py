#!/usr/bin/env python3
"""Compile every CUDA kernel with NVRTC for each architecture that muser names, and check that hot kernels do not spill.

No GPU is needed. With --digests the machine code of every compilation is named by its SHA-256, so that two versions can be compared. Without a virtual environment of its own the script makes one in target/check-cuda and installs the
NVRTC and cuobjdump wheels there.
"""
import ctypes, glob, hashlib, os, re, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "crates/muser-cuda/src/kernels")
HEADERS = ["ptx.cuh", "common.cuh", "layout.cuh", "cache.cuh"]
# What stands between these and a file.
SERVING = {"project.cu": ["tile.cuh"], "stream.cu": ["stream.cuh"], "stream_wide.cu": ["tile.cuh", "stream.cuh"], "join.cu": ["stream.cuh"], "chain.cu": ["tile.cuh", "ring.cuh"], "attend.cu": ["kv.cuh", "flash.cuh"], "attend_wide.cu": ["flash.cuh"], "decode.cu": ["kv.cuh"]}
STRICT = {"strict.cu": ["strict.cuh"], "strict_attend.cu": ["strict.cuh"], "strict_project.cu": ["strict.cuh", "panels.cuh"],
          "strict_pack.cu": ["panels.cuh", "pack.cu"]}
ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]
TUNED = ["sm_80", "sm_86", "sm_89", "sm_90a"]  # later ones compile; their registers have not been tuned
# Columns of products: warps of a block and tiles in the ring of each, and on cards with 100 KB of shared memory (the usual choice of product.rs).
CREWS = {1: ((8, 3), (8, 3)), 2: ((8, 3), (8, 3)), 4: ((16, 4), (8, 3)), 8: ((16, 4), (8, 3)), 16: ((16, 2), (4, 2))}
SMALL = ["sm_86", "sm_89", "sm_120"]
WHEELS = ["nvidia-cuda-nvrtc==13.*", "nvidia-cuda-cuobjdump==13.*"]


def environment():
    venv = os.path.join(ROOT, "target/check-cuda")
    python = os.path.join(venv, "bin/python")
    if not os.path.exists(python):
        subprocess.check_call([sys.executable, "-m", "venv", venv])
    subprocess.check_call([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *WHEELS])
    return glob.glob(os.path.join(venv, "lib/python3*/site-packages/nvidia/cu13"))[0]


def compile(nvrtc, name, source, arch):
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None) == 0
    arithmetic = b"--fmad=false" if name in STRICT else b"--use_fast_math"
    options = [arithmetic, b"--std=c++17", f"--gpu-architecture={arch}".encode()]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if code != 0:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(f"{name} for {arch} does not compile:\n{log.value.decode()}")
    size = ctypes.c_size_t()
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    binary = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, binary) == 0
    return binary.raw


def wide(layout, columns):
    """Stages and tiles of stream_wide.cu's rings (stream.rs)."""
    tiles = 2 if columns == 128 else 3
    held = 1 if layout == 0 else 2 if layout in (1, 5) else tiles
    stages = min(4, (232448 - 16 * held * {0: 8192, 1: 4352, 4: 2816, 5: 3360}.get(layout, 2304)) // (288 * columns + 16))
    return f"#define TYPE {layout}\n#define COLUMNS {columns}\n#define STAGES {stages}\n#define RING_TILES {tiles}" if stages >= 3 else None


def crew(define, arch):
    """How many warps a product's block has on cards of an architecture, tiles each, and warps that multiply together (product.rs), as lines of its source."""
    columns = re.search(r"COLUMNS (\d+)$", define)
    if not columns:
        return ""
    team = "\n#define TEAM 4" if arch == "sm_90a" and columns[1] == "16" else ""
    return "\n#define WARPS {}\n#define RING_TILES {}".format(*CREWS[int(columns[1])][arch in SMALL]) + team


def is_hot(kernel):
    """Kernels of a decode step and of prefill."""
    return kernel in ("project", "chain", "stream", "stream_wide", "arrange", "join", "widen", "tail", "tail_rows", "silu_rows", "qk_rows", "attend_few", "attend_join", "attend_rows", "attend_wide", "k_norm_rope_store",
                      "strict_project_1", "strict_project_1_wide", "strict_project_8", "strict_scores", "strict_values")


def main():
    root = environment()
    nvrtc = ctypes.CDLL(glob.glob(os.path.join(root, "lib/libnvrtc.so.*"))[0])
    cuobjdump = os.path.join(root, "bin/cuobjdump")
    os.chmod(cuobjdump, 0o755)
    text = lambda names: "\n".join(open(os.path.join(KERNELS, name)).read() for name in names)
    spills, compiled = [], 0
    # Q4_K or Q5_K beside Q6_K is what the K mixes have.
    kinds = [str(t) for t in range(8)] + ["3\n#define SIDE 5", "4\n#define SIDE 5"]
    pairs = [f"#define TYPE {t}\n#define COLUMNS {n}" for t in kinds for n in CREWS]
    sources = [f"#define SOURCE {n}" for n in range(12)]
    types = [f"#define TYPE {t}" for t in range(2, 8)]
    wides = [define for t in range(8) for n in (32, 64, 128) if (define := wide(t, n))]
    caches = ["", "#define KV_Q8_0"]
    chains = [f"#define COLUMNS {n}\n#define FIRST {kind.replace('SIDE', 'SECOND')}" for kind in kinds for n in (1, 2) if (kind, n) != ("1", 2)]
    variants = lambda name: {"chain.cu": chains, "attend.cu": caches, "decode.cu": caches, "project.cu": pairs, "stream.cu": types, "stream_wide.cu": wides, "pack.cu": sources, "strict_pack.cu": sources}.get(name, [""])
    work = [(path, define) for path in sorted(glob.glob(os.path.join(KERNELS, "*.cu"))) for define in variants(os.path.basename(path))]
    for path, define in work:
        name = os.path.basename(path)
        for arch in ["sm_90a"] if name in ("stream_wide.cu", "attend_wide.cu") else ARCHS:   # warpgroups' instructions belong to it alone
            binary = compile(nvrtc, name, define + crew(define, arch) + "\n" + text(HEADERS + (SERVING | STRICT).get(name, []) + [name]), arch)
            compiled += 1
            if "--digests" in sys.argv:
                print(arch, name, repr(define), hashlib.sha256(binary).hexdigest())
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(binary)
                file.flush()
                report = subprocess.check_output([cuobjdump, "--dump-resource-usage", file.name], text=True)
            for kernel, use in re.findall(r"Function (\w+):\s*\n\s*(.*)", report):
                registers, stack, local = (int(re.search(rf"{k}:(\d+)", use).group(1)) for k in ("REG", "STACK", "LOCAL"))
                if arch == "sm_90a":
                    print(f"{name:11} {define[8:].replace(chr(10) + '#define', ','):26} {kernel:20} {registers:4} registers, stack {stack}, local {local}")
                # Products leave a few words to memory, outside their loops; so do norms of two rows.
                spared = 24 if kernel == "project" else 8 if kernel == "stream_wide" else 40 if kernel == "chain" and "COLUMNS 2" in define else 0
                if (local > 0 or stack > spared) and is_hot(kernel) and arch in TUNED:
                    spills.append(f"{name} {kernel} {arch}: stack {stack}, local {local}")
    print(f"{compiled} compilations for {', '.join(ARCHS)}")
    if spills:
        sys.exit("kernels that spill:\n" + "\n".join(spills))


if __name__ == "__main__":
    main()
