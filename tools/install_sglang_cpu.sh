#!/usr/bin/env bash
# SGLang on a CPU in an environment of its own: 1.5 GB, about three minutes. Usage: tools/install_sglang_cpu.sh VENV
# PYTHON: which Python to use, 3.11 or newer. TORCH_INDEX: where PyTorch's builds for CPUs are.
set -euo pipefail
venv=${1:?"usage: $0 VENV"}
here=$(cd "$(dirname "$0")" && pwd)

"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check)
# an index of one's own may have this build; PyPI has not, and says so at once
"${pip[@]}" --no-deps torch==2.13.0+cpu 2> /dev/null ||
  "${pip[@]}" --no-deps --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch==2.13.0+cpu
# exact versions without their dependencies, as the package asks for CUDA libraries
"${pip[@]}" --no-deps -r "$here/sglang_cpu/requirements.txt"

# what is imported and not called on a CPU
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here"/sglang_cpu/*.py "$packages/"
echo 'import sglang_cpu_stand_ins; sglang_cpu_stand_ins.install()' > "$packages/sglang_cpu_stand_ins.pth"
