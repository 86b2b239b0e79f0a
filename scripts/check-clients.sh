#!/usr/bin/env bash
# The official clients and the web page against `muser serve`. Makes its own Python environment below target/.
set -euo pipefail
cd "$(dirname "$0")/.."
env=target/clients
[ -x "$env/bin/pytest" ] || python3 -m venv "$env"
"$env/bin/pip" install -q --disable-pip-version-check -r tests/clients/requirements.txt
if ! command -v "${CHROMIUM:-chromium}" >/dev/null; then
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium
fi
cargo build -q --release -p muser
"$env/bin/pytest" -q -p no:cacheprovider tests/clients
