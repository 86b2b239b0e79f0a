#!/usr/bin/env python3
"""muser beside llama.cpp on one GGUF, in interleaved pairs; prints medians and ratios.

usage: compare_llama_cpp.py MODEL.gguf [--muser PATH] [--llama-bench PATH] [--threads 2] [--pairs 5]
                            [--decode 16] [--prefill 512] [--depth 0]

llama-bench is taken from --llama-bench, else from PATH, else built from the source that the PyPI package
llama-cpp-python carries (needs pip, cmake and a C++ compiler; a few minutes; kept in --build).
synthetic_gguf.py beside this file writes a model of the release's width with any number of layers.
Machines are shared and their memory's speed moves: only ratios within a pair mean anything.
"""
import argparse, json, pathlib, shutil, statistics, subprocess, sys, tarfile

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
p.add_argument("--depth", type=int, default=0)
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


def muser(prefill, decode):
    out = subprocess.run([a.muser, "bench", "-m", a.model, "--prefill", str(prefill), "--decode", str(decode),
                          "--depth", str(a.depth), "--threads", str(a.threads), "--json"],
                         check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def llama(prefill, decode, repack=1):
    out = subprocess.run([a.llama_bench, "-m", a.model, "-t", str(a.threads), "-p", str(prefill), "-n", str(decode),
                          "-d", str(a.depth), "-r", "1", "--repack", str(repack), "-o", "json"],
                         check=True, capture_output=True, text=True).stdout
    return json.loads(out)[0]["avg_ts"]


def report(what, ours, theirs):
    ratio = statistics.median(o / t for o, t in zip(ours, theirs))
    print(f"{what:28} muser {statistics.median(ours):8.2f} tok/s   llama.cpp {statistics.median(theirs):8.2f} tok/s"
          f"   median ratio {ratio:.2f}", flush=True)


a.llama_bench = a.llama_bench or build()
pairs = range(a.pairs)
ours, theirs, shares = [], [], []
for _ in pairs:
    run = muser(0, a.decode)
    ours.append(run["decode_tok_s"])
    shares.append((run.get("read_gb_s"), run.get("decode_gb_s")))
    theirs.append(llama(0, a.decode))
report(f"decode, depth {a.depth}", ours, theirs)
known = [(read, got) for read, got in shares if read and got]
if known:
    print(f"{'':28} share of the read bandwidth of the same minute: "
          f"{100 * statistics.median(got / read for read, got in known):.0f} %")
ours, default, plain = [], [], []
for _ in pairs:
    ours.append(muser(a.prefill, 0)["prefill_tok_s"])
    default.append(llama(a.prefill, 0))
    plain.append(llama(a.prefill, 0, repack=0))
report(f"prefill {a.prefill}", ours, default)
report(f"prefill {a.prefill}, --no-repack", ours, plain)
