#!/usr/bin/env bash
# SGLang on a CPU in an environment of its own: 1.5 GB, about three minutes. Usage: tools/install_sglang_cpu.sh VENV
# PYTHON: which Python to use, 3.11 or newer. TORCH_INDEX: where PyTorch's builds for CPUs are.
set -euo pipefail
venv=${1:?"usage: $0 VENV"}
here=$(cd "$(dirname "$0")" && pwd)

# exact versions without their dependencies, as the package asks for CUDA libraries
"$here/create_server_environment.sh" "$venv" "$here/sglang_cpu/requirements.txt"

# what is imported and not called on a CPU
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here"/sglang_cpu/*.py "$packages/"
echo 'import sglang_cpu_stand_ins; sglang_cpu_stand_ins.install()' > "$packages/sglang_cpu_stand_ins.pth"
