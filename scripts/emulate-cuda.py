#!/usr/bin/env python3
"""Run the CUDA kernels that pack, widen and multiply weights on this machine's CPU, against golden blocks; needs g++, no GPU.

All runs are checked for accesses out of bounds, and some for races between the threads of a block.
"""
import json, os, re, struct, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "crates/muser-cuda/src/kernels")
HERE = os.path.join(ROOT, "scripts/emulate")
# name in the goldens: (SOURCE of pack.cu, TYPE of layout.cuh, bytes and values of a block)
TYPES = {"F16": (1, 0, 2, 1), "BF16": (2, 0, 2, 1), "Q8_0": (3, 1, 34, 32), "Q4_0": (4, 2, 18, 32), "Q4_K": (5, 3, 144, 256),
         "Q5_K": (6, 4, 176, 256), "Q6_K": (7, 5, 210, 256)}

RUNS = [(1, "address"), (16, "address")]
RACES = [(4, "thread")]


def text(name):
    """A kernel file without the functions that cuda.h has instead, and without what the file declares twice."""
    source = open(os.path.join(KERNELS, name)).read()
    if name == "common.cuh":
        first = source.index("// An activation as products")
        head = re.search(r"__device__ __forceinline__ u32 twice_low.*?\n.*?\n", source).group(0)
        bf16 = re.search(r"__device__ __forceinline__ float bf16_to_float.*\n", source).group(0)
        return head + bf16 + source[first:]
    # Functions written in PTX: one line or a body up to a brace in the first column.
    for name in ("copy16", "commit", "arrived", "mma8", "lds128", "lds64", "lds32", "lds16"):
        source = re.sub(r"(template <int N>\n)?__device__ __forceinline__ \w+ " + name + r"\(.*?\) \{(.*\}\n|\n(.*\n)*?\}\n)", "", source, count=1)
    source = re.sub(r"#define THREADS .*\n", "", source)
    return source.replace("extern __shared__ uint4 shared_bytes[];", "#define shared_bytes shared_memory")


def main():
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
            for columns, sanitizer in RUNS + (RACES if name in ("Q4_K", "Q6_K") else []):
                program = os.path.join(folder, "program")
                source = f'#define TYPE {layout}\n#define COLUMNS {columns}\n#define SOURCE {number}\n#define THREADS {512 if columns > 4 else 256}\n#include "cuda.h"\n'
                source += "".join(text(n) for n in ("common.cuh", "layout.cuh", "pack.cu", "project.cu", )) + open(os.path.join(HERE, "project.cpp")).read()
                path = program + ".cpp"
                open(path, "w").write(source)
                subprocess.check_call(["g++", "-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-mf16c", "-mfma", "-w", "-pthread", "-I", HERE, path, "-o", program])
                if subprocess.call(["timeout", "300", program, raw, values, str(block), str(length)]) != 0:
                    failed.append(f"{name}, {columns} columns, {sanitizer}")
    if failed:
        sys.exit("wrong or hung: " + "; ".join(failed))


if __name__ == "__main__":
    main()
