#!/usr/bin/env python3
"""Runs llama.cpp's own tests of its server, where they apply, against `muser serve` with the default model.

    benches/llama_server_tests.py [--sdist FILE] [PYTEST OPTIONS]

The tests come from the source of the Python package llama_cpp_python, which pip downloads once to target/llama-tests; none of
them is part of this repository. docs/llama-server-tests.md lists what runs and what is left out, and why. The tests start the
server themselves, with llama.cpp's options: this file, named as their server, starts muser with what they mean.
MUSER names the binary [target/release/muser]; PORT a free port [18200].
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "target/llama-tests"
VERSION = "0.3.36"
LIST = ROOT / "docs/llama-server-tests.md"


def serve(arguments):
    """Becomes muser, in place of llama-server with these options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--port", "--host", "--ctx-size", "--parallel", "--alias", "--api-key", "--slot-save-path", "--cors-origins"):
        parser.add_argument(name)
    given, _ = parser.parse_known_args(arguments)
    slots = int(given.parallel or 1)
    command = [os.environ["MUSER"], "serve", "-m", str(ROOT / "models/glimmer-mini-Q8_0.gguf"), "--log", "warn"]
    command += ["--port", given.port, "--host", given.host, "--slots", str(slots)]
    if given.ctx_size:
        command += ["--context", str(int(given.ctx_size) // slots)]
    for name in ("alias", "api_key", "slot_save_path"):
        if getattr(given, name):
            command += ["--" + name.replace("_", "-"), getattr(given, name)]
    os.execv(command[0], command)


def unpack(sdist):
    """The tests and a Python environment for them."""
    tests = FOLDER / "tests"
    if not tests.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        if not sdist:
            package = f"llama_cpp_python=={VERSION}"
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(FOLDER), package]
            subprocess.run(pip, check=True, timeout=600)
            sdist = FOLDER / f"llama_cpp_python-{VERSION}.tar.gz"
        with tarfile.open(sdist) as archive:
            for member in archive:
                inside = member.name.partition("/vendor/llama.cpp/tools/server/tests/")[2]
                if inside and member.isfile() and ".." not in inside:
                    target = tests / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.extractfile(member).read())
    # The tests of other models would download them with it.
    (tests / "wget.py").write_text("def download(*_, **__):\n    raise RuntimeError('nothing is downloaded')\n")
    python = FOLDER / "env/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / "env")], check=True)
        packages = ["pytest==8.*", "requests==2.*", "openai==2.*", "filelock==3.*", "aiohttp==3.*", "numpy==2.*"]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, timeout=600)
    return tests, python


def listed():
    """The files that the document lists to be run, and the tests of theirs that it leaves out."""
    text = LIST.read_text()
    files = re.findall(r"^\| `(test_\w+)` \| \d+", text, re.M)
    return files, set(re.findall(r"`(test_\w+::test_\w+(?:\[[^`\n]*\])?)`", text))


def chosen(python, tests, env):
    """Ids of the tests to run."""
    files, out = listed()
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", *(f"unit/{f}.py" for f in files)]
    found = subprocess.run(command, cwd=tests, env=env, check=True, capture_output=True, text=True).stdout
    ids = [line for line in found.splitlines() if "::" in line]
    short = {id: id.removeprefix("unit/").replace(".py", "", 1) for id in ids}
    runs = [id for id in ids if short[id] not in out and short[id].partition("[")[0] not in out]
    unknown = out - set(short.values()) - {name.partition("[")[0] for name in short.values()}
    assert not unknown, f"the document leaves out tests that are not there: {unknown}"
    print(f"{len(ids)} tests in {len(files)} files; {len(runs)} run, {len(ids) - len(runs)} are left out")
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=pathlib.Path, help="the package's source, if it is here already")
    args, more = parser.parse_known_args()
    tests, python = unpack(args.sdist)
    env = os.environ | {"LLAMA_SERVER_BIN_PATH": str(pathlib.Path(__file__).resolve())}
    env["MUSER"] = os.environ.get("MUSER", str(ROOT / "target/release/muser"))
    env.setdefault("PORT", "18200")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *chosen(python, tests, env), *more]
    return subprocess.run(command, cwd=tests, env=env).returncode


if __name__ == "__main__":
    if "--port" in sys.argv:
        serve(sys.argv[1:])
    sys.exit(main())
