#!/usr/bin/env python3
"""muser beside llama.cpp on one GGUF, in interleaved pairs; prints medians and ratios.

usage: compare_llama_cpp.py MODEL.gguf [--muser PATH] [--llama-bench PATH] [--threads 2] [--pairs 5]
                            [--decode 16] [--prefill 512] [--groups 4,5,8,16] [--depth 0]

0 (or an empty list) leaves a part out. llama-bench is taken from --llama-bench, else from PATH, else built from the
source that the PyPI package llama-cpp-python carries (needs pip, cmake and a C++ compiler; minutes; kept in --build).
synthetic_gguf.py beside this file writes a model of the release's width with any number of layers.

Machines are shared and their memory's speed moves, so only ratios within a pair mean anything. What the machine could
do (bytes read and 8-bit operations a second, as `muser bench` measures them in each of its runs) stands beside them.
A pair during which other programs took more than --others of the processors is made again, at most twice as often as
pairs are asked for; how many were is printed.
"""
import argparse, json, os, pathlib, resource, shutil, statistics, subprocess, sys, tarfile

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("--muser", default="target/release/muser")
p.add_argument("--llama-bench", default=shutil.which("llama-bench"))
p.add_argument("--build", type=pathlib.Path, default=pathlib.Path("target/llama.cpp"))
p.add_argument("--version", default="0.3.36", help="of llama-cpp-python, where it is built")
p.add_argument("--threads", type=int, default=2)
p.add_argument("--pairs", type=int, default=5)
p.add_argument("--decode", type=int, default=16)
p.add_argument("--prefill", type=int, default=512)
p.add_argument("--groups", default="4,5,8,16")
p.add_argument("--depth", type=int, default=0)
p.add_argument("--others", type=float, default=0.05)
a = p.parse_args()


def build():
    """llama-bench from the PyPI source package."""
    bench = a.build / "build/bin/llama-bench"
    if bench.exists():
        return str(bench)
    a.build.mkdir(parents=True, exist_ok=True)
    name = f"llama-cpp-python=={a.version}"
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python",
                    "-d", a.build, name], check=True)
    with tarfile.open(next(a.build.glob("llama_cpp_python-*.tar.gz"))) as tar:
        tar.extractall(a.build, filter="data")
    source = next(a.build.glob("llama_cpp_python-*/vendor/llama.cpp"))
    off = ["LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER"]
    subprocess.run(["cmake", "-S", source, "-B", a.build / "build", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
                   + [f"-D{name}=OFF" for name in off], check=True)
    subprocess.run(["cmake", "--build", a.build / "build", "--target", "llama-bench", "-j", "2"], check=True)
    return str(bench)


def busy():
    """Processor seconds that all programs (and, in a virtual machine, the host) have taken, and this one's children."""
    ticks = [int(t) for t in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    mine = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), mine.ru_utime + mine.ru_stime, sum(ticks)


def rounds(once):
    """Calls `once` until as many undisturbed rounds are there as pairs were asked for."""
    kept, again = [], 0
    while len(kept) < a.pairs:
        before = busy()
        result = once()
        after = busy()
        whole = (after[2] - before[2]) / os.sysconf("SC_CLK_TCK")
        others = (after[0] - before[0] - (after[1] - before[1])) / whole
        if others > a.others and again < 2 * a.pairs:
            again += 1
            continue
        kept.append(result + (others,))
        rates = [r if isinstance(r, float) else r["decode_tok_s"] or r["prefill_tok_s"] for r in result]
        print("  round:", *(f"{rate:.2f}" for rate in rates), "tok/s", file=sys.stderr, flush=True)
    print(f"  other programs took {100 * max(r[-1] for r in kept):.0f} % of the processors at most; "
          f"{again} rounds made again")
    return list(zip(*kept))


def output(*command):
    run = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{run.stderr}")
    return json.loads(run.stdout)


def muser(prefill=0, decode=0, groups=""):
    more = ["--groups", groups] if groups else []
    return output(a.muser, "bench", "-m", a.model, "--prefill", prefill, "--decode", decode, "--depth", a.depth,
                  "--threads", a.threads, "--repeat", 3, "--json", *more)


def llama(prefill=0, decode=0, repack=1):
    # One repetition after the warm-up; the cache and flash attention as llama.cpp chooses them.
    return output(a.llama_bench, "-m", a.model, "-t", a.threads, "-p", prefill, "-n", decode, "-d", a.depth,
                  "-r", 1, "--repack", repack, "-o", "json")[0]["avg_ts"]


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def limit(runs, key, unit, share):
    of = [run[share] for run in runs]
    print(f"  limit in the same runs: {spread([run[key] for run in runs])} {unit}; muser's share {spread(of)}")


def compare(what, runs, key, baselines):
    ours = [run[key] for run in runs]
    print(f"{what}: muser {spread(ours)} tok/s")
    for name, theirs in baselines.items():
        print(f"  llama.cpp{name} {spread(theirs)} tok/s; ratio {spread([o / t for o, t in zip(ours, theirs)])}")


a.llama_bench = a.llama_bench or build()
print(f"{a.model}, {a.threads} threads, {a.pairs} pairs: medians (least to most)", flush=True)
NAMES = "", " --repack 0"
if a.decode:
    runs, *theirs, _ = rounds(lambda: (muser(decode=a.decode), llama(decode=a.decode), llama(decode=a.decode, repack=0)))
    compare(f"decode at depth {a.depth}", runs, "decode_tok_s", dict(zip(NAMES, theirs)))
    limit(runs, "read_gb_s", "GB/s", "decode_share")
    print(f"  loading: {spread([run['weight_bytes'] / run['load_seconds'] / 1e9 for run in runs])} GB/s", flush=True)
if a.prefill:
    runs, *theirs, _ = rounds(
        lambda: (muser(prefill=a.prefill), llama(prefill=a.prefill), llama(prefill=a.prefill, repack=0)))
    compare(f"prefill of {a.prefill} at depth {a.depth}", runs, "prefill_tok_s", dict(zip(NAMES, theirs)))
    limit(runs, "peak_tops", "Top/s", "prefill_share")
    sys.stdout.flush()
if a.groups:
    runs, _ = rounds(lambda: (muser(decode=a.decode or 16, groups=a.groups),))
    for i, size in enumerate(a.groups.split(",")):
        steps = [run["groups"][i]["steps_of_one"] for run in runs]
        print(f"group of {size}: {spread(steps)} times the step of one row")
    limit(runs, "read_gb_s", "GB/s", "decode_share")
