#!/usr/bin/env bash
# What the environments of both servers on a CPU begin with. Usage: tools/create_server_environment.sh VENV REQUIREMENTS
# PYTHON: which Python to use, 3.11 or newer. TORCH_INDEX: where PyTorch's builds for CPUs are.
set -euo pipefail
venv=${1:?"usage: $0 VENV REQUIREMENTS"}
requirements=${2:?"usage: $0 VENV REQUIREMENTS"}

"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile) # Python compiles what is imported, a small part
# an index of one's own may have this build; PyPI has not, and says so at once
"${pip[@]}" --no-deps torch==2.13.0+cpu 2> /dev/null ||
  "${pip[@]}" --no-deps --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch==2.13.0+cpu
"${pip[@]}" --no-deps -r "$requirements"
