#!/usr/bin/env bash
# Tests against a real server on a CPU, which is installed first where that was not done.
# Usage: tools/run_server_tests.sh vllm|sglang [PYTEST ARGS]
# PYTHON: with rollouts-rl[test], default .venv/bin/python. VLLM_VENV, SGLANG_VENV: the server's environment, default .venv-vllm, .venv-sglang.
set -euo pipefail
kind=${1:?"usage: $0 vllm|sglang [PYTEST ARGS]"}
shift
cd "$(dirname "$0")/.."
case $kind in
  vllm) venv=${VLLM_VENV:-.venv-vllm} ;;
  sglang) venv=${SGLANG_VENV:-.venv-sglang} ;;
  *) echo "$0: the server is $kind, expected vllm or sglang" >&2; exit 2 ;;
esac
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import pytest, rollouts' 2> /dev/null; then
  echo "$0: $python cannot import pytest and rollouts: python3 -m venv .venv && .venv/bin/pip install -e '.[test]', or set PYTHON" >&2
  exit 2
fi

# the environment is kept, and made anew when what it is made of changes
recipe=$(find tools/create_server_environment.sh "tools/install_${kind}_cpu.sh" "tools/${kind}_cpu" -type f -not -name '*.pyc' | sort | xargs cat | sha256sum)
if [ "$(cat "$venv/recipe" 2> /dev/null)" != "$recipe" ]; then
  if [ -n "$(ls -A "$venv" 2> /dev/null)" ] && [ ! -e "$venv/recipe" ]; then
    echo "$0: $venv was not made by this script and is not replaced: name another place, or remove it" >&2
    exit 2
  fi
  rm -rf "$venv"
  mkdir -p "$venv"
  echo "unfinished" > "$venv/recipe"
  PYTHON="$python" tools/install_${kind}_cpu.sh "$venv"
  echo "$recipe" > "$venv/recipe"
fi
VLLM_PYTHON="$venv/bin/python" SGLANG_PYTHON="$venv/bin/python" exec "$python" -m pytest -m "$kind" tests/real_servers "$@"
