#!/usr/bin/env bash
# Tests against a real vLLM on a CPU; see run_server_tests.sh.
exec "$(dirname "$0")/run_server_tests.sh" vllm "$@"
