#!/usr/bin/env python3
"""Run the CUDA kernels, and the CUDA device with them, on this machine's CPU. Needs g++ on x86-64 with AVX2, no GPU.

First the kernels that pack, widen and multiply weights, against golden blocks, a thread of the system for each of theirs: all runs
are checked for accesses out of bounds, some for races between the threads of a block. Then whole models, through a library that stands
for driver, compiler and cuBLAS (emulate/card.cpp): logits of the serving lane against the f32 reference, bits of the strict lane.
"""
import glob, json, os, re, struct, subprocess, sys, tempfile, zlib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "crates/muser-cuda/src/kernels")
HERE = os.path.join(ROOT, "scripts/emulate")
# name in the goldens: (SOURCE of pack.cu, TYPE of layout.cuh, bytes and values of a block)
TYPES = {"F16": (1, 0, 2, 1), "BF16": (2, 0, 2, 1), "Q8_0": (3, 1, 34, 32), "Q4_0": (4, 2, 18, 32), "Q4_K": (5, 3, 144, 256),
         "Q5_K": (6, 4, 176, 256), "Q6_K": (7, 5, 210, 256), "IQ4_NL": (8, 6, 18, 32), "IQ4_XS": (9, 6, 136, 256),
         "NVFP4": (10, 7, 36, 64), "Q3_K": (11, 5, 110, 256)}

# Columns and warps of a block, warps that multiply together, and what is looked for.
RUNS = [(1, 8, 1, "address"), (16, 16, 4, "address")]
MORE = [(4, 16, 1, "thread"), (16, 8, 1, "address")]


def text(name):
    """A kernel file as emulate/threads.h wants it."""
    source = re.sub(r"#define THREADS .*\n", "", open(os.path.join(KERNELS, name)).read())
    return source.replace("extern __shared__ uint4 shared_bytes[];", "#define shared_bytes shared_memory")


def blocks():
    goldens = open(os.path.join(ROOT, "tests/fixtures/quant-blocks/blocks.safetensors"), "rb").read()
    size = struct.unpack("<Q", goldens[:8])[0]
    index, data = json.loads(goldens[8:8 + size]), goldens[8 + size:]
    array = lambda name: data[slice(*index[name]["data_offsets"])]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (number, layout, block, length) in TYPES.items():
            raw, values = os.path.join(folder, "raw"), os.path.join(folder, "values")
            open(raw, "wb").write(array(f"{name}.blocks"))
            open(values, "wb").write(array(f"{name}.f32"))
            for columns, warps, team, sanitizer in RUNS + (MORE if name in ("Q4_K", "Q6_K") else []):
                program = os.path.join(folder, "program")
                source = f'#define TYPE {layout}\n#define SIDE {layout}\n#define COLUMNS {columns}\n#define SOURCE {number}\n#define WARPS {warps}\n#define TEAM {team}\n#define RING_TILES 3\n#define THREADS {32 * warps}\n#include "cuda.h"\n#include "ptx.h"\n'
                source += "".join(text(n) for n in ("common.cuh", "layout.cuh", "pack.cu", "tile.cuh", "project.cu")) + open(os.path.join(HERE, "project.cpp")).read()
                path = program + ".cpp"
                open(path, "w").write(source)
                subprocess.check_call(["g++", "-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-mf16c", "-mfma", "-w", "-pthread", "-I", HERE, path, "-o", program])
                if subprocess.call(["timeout", "300", program, raw, values, str(block), str(length)]) != 0:
                    failed.append(f"{name}, {columns} columns, {warps} warps, {team} a team, {sanitizer}")
    if failed:
        sys.exit("wrong or hung: " + "; ".join(failed))


def build():
    """Builds the emulated card; returns the folder of its libraries."""
    build = os.path.join(ROOT, "target/emulate")
    os.makedirs(build, exist_ok=True)
    flags = "-std=c++20 -O2 -mavx2 -mf16c -mfma -ffp-contract=off -fno-strict-aliasing -w -pthread -fPIC -mtls-dialect=gnu2 -DFIBERS"
    subprocess.check_call(["g++", *flags.split(), "-x", "c++-header", os.path.join(HERE, "cuda.h"), "-o", os.path.join(build, "cuda.h.gch")])
    version = 0
    for path in sorted(glob.glob(os.path.join(HERE, "*"))):
        version = zlib.crc32(open(path, "rb").read(), version)
    library = os.path.join(build, "libcuda.so")
    compiler = f"g++ {flags} -I {build} -I {HERE}"
    subprocess.check_call(["g++", *flags.split(), "-shared", f"-DEMULATOR={version & 0x7fffffff}", f'-DGXX="{compiler}"', os.path.join(HERE, "card.cpp"), "-o", library, "-ldl"])
    for name in ("libnvrtc.so", "libcublas.so"):
        link = os.path.join(build, name)
        if not os.path.lexists(link):
            os.symlink("libcuda.so", link)
    return build


def full_card(environment):
    """On a card that holds the model and not its context, `--device auto` answers from the CPU and says why; as many layers as it says fit
    run on it, and not one more."""
    subprocess.check_call(["cargo", "build", "--locked", "-p", "muser"], cwd=ROOT)
    command = [os.path.join(ROOT, "target/debug/muser"), "run", "-m", "tests/fixtures/gguf/tiny-Q8_0.gguf", "--raw", "-c", "0", "-n", "1", "--json", "hello"]

    def ran(device, bytes, *more):
        return subprocess.run([*command, "--device", device, *more], cwd=ROOT, env=environment | {"EMULATED_BYTES": str(bytes)}, capture_output=True, text=True)
    model = int(re.search(r"needs (\d+) bytes", ran("cuda", 1).stderr)[1])
    refused, answered = ran("cuda", model), ran("auto", model)
    why = re.search(r"a context of 131072 tokens .*", refused.stderr)
    if not why or why[0] not in answered.stderr or '"device":"emulated' in answered.stdout or answered.returncode != 0:
        sys.exit(f"a context that does not fit: {refused.stderr}{answered.stderr}")
    fit = int(re.search(r"--gpu-layers (\d+) fits", refused.stderr)[1])
    some, more = [ran("cuda", model, "--gpu-layers", str(n)) for n in (fit, fit + 1)]
    if some.returncode != 0 or "the rest on emulated" not in some.stdout or f"--gpu-layers {fit} fits" not in more.stderr:
        sys.exit(f"{fit} layers were to fit: {some.stderr}{more.stderr}")


def models():
    """Runs muser-cuda's own checks on the emulated card."""
    libraries = build()
    subprocess.check_call(["cargo", "build", "--locked", "-p", "muser-cuda", "--example", "card"], cwd=ROOT)
    card = os.path.join(ROOT, "target/debug/examples/card")
    environment = os.environ | {"LD_LIBRARY_PATH": libraries, "XDG_CACHE_HOME": os.path.join(libraries, "cache")}
    full_card(environment)
    # Groups of products have fewer warps on a card with little shared memory.
    subprocess.check_call(["timeout", "900", card, "check", "16", "16"], cwd=ROOT, env=environment | {"EMULATED_SHARED": "101376"})
    for arguments in (["check", "24"], ["check", "40", "64"], ["check", "40", "64", "kv=q8_0"], ["deep"], ["state", "kv=q8_0"], ["strict", "p24", "7", "64"], ["split"]):
        subprocess.check_call(["timeout", "900", card, *arguments], cwd=ROOT, env=environment)
    # Text sampled with a seed in the strict lane is the processor's.
    subprocess.check_call(["cargo", "test", "--locked", "-p", "muser", "--test", "seeded", "--", "--ignored"], cwd=ROOT, env=environment)


if __name__ == "__main__":
    blocks()
    models()
