"""The Vercel AI SDK, by node's own test runner.

NODE names node, and VERCEL the folder where the SDK is installed and its tests lie: scripts/check-clients.sh makes both.
"""

import os
import re
import subprocess

from conftest import KEY, MODEL


def test_vercel_ai_sdk(server):
    folder, node = os.environ.get("VERCEL"), os.environ.get("NODE")
    assert folder and node, "the SDK is not installed: run scripts/check-clients.sh"
    env = os.environ | {"MUSER_URL": server, "MUSER_KEY": KEY, "MUSER_MODEL": MODEL}
    command = [node, "--test", "--test-reporter=tap", "sdk.test.mjs"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    counts = {name: int(n) for name, n in re.findall(r"^# (\w+) (\d+)$", done.stdout, re.M)}
    assert done.returncode == 0 and counts["pass"] == counts["tests"] == 32, done.stdout[-8000:] + done.stderr[-2000:]
