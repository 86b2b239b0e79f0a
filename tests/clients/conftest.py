"""Starts `muser serve` with the model in models/ for the official clients.

MUSER names the binary; without it the newest of target/{release,debug}/muser is taken.
"""

import contextlib
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODEL = "glimmer-mini-Q8_0"
KEY = "a-key-for-the-tests"


def binary():
    named = os.environ.get("MUSER")
    if named:
        return named
    built = [p for p in (ROOT / "target" / k / "muser" for k in ("release", "debug")) if p.exists()]
    assert built, "build it first: cargo build --release -p muser"
    return str(max(built, key=lambda p: p.stat().st_mtime))


@contextlib.contextmanager
def serve(*more):
    """A server with these further options; its address."""
    model = ROOT / "models" / f"{MODEL}.gguf"
    command = [binary(), "serve", "-m", str(model), "--port", "0", "--api-key", KEY, "--log", "warn", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        found = re.match(r"listening on (http://\S+)", line)
        assert found, f"the server said {line!r}"
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.fixture(scope="session")
def server():
    with serve() as address:
        yield address


def weather_tool():
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"name": "get_weather", "description": "The weather of a city", "parameters": parameters}
