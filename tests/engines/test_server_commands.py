"""Command lines and environments of inference servers, and what their logs say about their end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.engines.launch.commands import (
    ServerConfig,
    build_command,
    build_environment,
    build_sglang_command,
    build_sglang_environment,
    build_vllm_command,
    build_vllm_environment,
)
from rollouts.engines.launch.log import TAIL_BYTES, clean_log, describe_log, describe_status, find_cause, read_log
from rollouts.errors import ConfigError

VLLM = ServerConfig(kind="vllm", model_path="/models/m", python="/envs/vllm/bin/python")
SGLANG = ServerConfig(kind="sglang", model_path="/models/m", python="/envs/sglang/bin/python")


def value_after(command: tuple[str, ...], name: str) -> str:
    assert command.count(name) == 1, f"{name} is there {command.count(name)} times in {command}"
    return command[command.index(name) + 1]


def test_vllm_gets_every_setting():
    config = replace(
        VLLM, dtype="float32", tensor_parallel_size=4, context_length=512, max_num_seqs=64, memory_fraction=0.7, skip_tokenizer_init=True,
        extra_args=("--seed", "3"),
    )  # fmt: skip
    command = build_vllm_command(config, 8123)
    assert command[:3] == ("/envs/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    expected = {
        "--model": "/models/m", "--host": "127.0.0.1", "--port": "8123", "--dtype": "float32", "--tensor-parallel-size": "4",
        "--max-model-len": "512", "--max-num-seqs": "64", "--gpu-memory-utilization": "0.7", "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }  # fmt: skip
    assert {name: value_after(command, name) for name in expected} == expected
    assert {"--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log"} <= set(command)
    assert command[-2:] == ("--seed", "3")


def test_sglang_gets_every_setting():
    config = replace(
        SGLANG, dtype="bfloat16", tensor_parallel_size=2, context_length=512, max_num_seqs=64, memory_fraction=0.7,
        skip_tokenizer_init=True, extra_args=("--seed", "3"),
    )  # fmt: skip
    command = build_sglang_command(config, 30001)
    assert command[:3] == ("/envs/sglang/bin/python", "-m", "sglang.launch_server")
    expected = {
        "--model-path": "/models/m", "--host": "127.0.0.1", "--port": "30001", "--dtype": "bfloat16", "--tp-size": "2", "--device": "cuda",
        "--context-length": "512", "--max-running-requests": "64", "--mem-fraction-static": "0.7",
    }  # fmt: skip
    assert {name: value_after(command, name) for name in expected} == expected
    assert "--skip-tokenizer-init" in command
    assert command[-2:] == ("--seed", "3")


def test_a_server_that_is_to_sleep_is_started_so():
    assert "--enable-sleep-mode" in build_vllm_command(replace(VLLM, can_sleep=True), 1)
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set(build_sglang_command(replace(SGLANG, can_sleep=True), 1))
    for command in (build_vllm_command(VLLM, 1), build_sglang_command(SGLANG, 1)):
        assert not {"--enable-sleep-mode", "--enable-memory-saver", "--enable-weights-cpu-backup"} & set(command)


@pytest.mark.parametrize("config", [VLLM, SGLANG])
def test_a_server_whose_experts_are_recorded_is_started_so(config):
    recording = replace(config, record_experts=True)
    assert "--enable-return-routed-experts" in build_command(recording, 1)
    assert "--enable-return-routed-experts" not in build_command(config, 1)
    assert build_environment(recording, {}).get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if config.kind == "vllm" else None)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in build_environment(config, {})


def test_what_is_left_open_is_left_to_the_server():
    assert not {"--max-model-len", "--max-num-seqs", "--gpu-memory-utilization", "--skip-tokenizer-init"} & set(build_command(VLLM, 1))
    assert not {"--context-length", "--max-running-requests", "--mem-fraction-static"} & set(build_command(SGLANG, 1))


def test_flags_for_a_cpu_stand_only_where_the_device_is_one():
    cpu_vllm = set(build_command(replace(VLLM, device="cpu"), 1)) - set(build_command(VLLM, 1))
    assert cpu_vllm == {"--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(2**28)}
    cpu_sglang = set(build_command(replace(SGLANG, device="cpu"), 1)) - set(build_command(SGLANG, 1))
    assert {"--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule"} <= cpu_sglang
    assert build_environment(replace(SGLANG, device="cpu"), {})["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in build_environment(SGLANG, {})


def test_a_cpu_server_never_takes_the_cache_size_that_fills_the_machine():
    assert value_after(build_command(replace(VLLM, device="cpu"), 1), "--kv-cache-memory-bytes") == str(2**28)
    assert value_after(build_command(replace(VLLM, device="cpu", memory_fraction=0.2), 1), "--gpu-memory-utilization") == "0.2"
    assert value_after(build_command(replace(SGLANG, device="cpu"), 1), "--max-total-tokens") == "16384"


def test_environment_of_vllm():
    own = build_vllm_environment(VLLM, {"PATH": "/usr/bin", "VLLM_SERVER_DEV_MODE": "0", "HF_HOME": "/models"})
    assert own["VLLM_SERVER_DEV_MODE"] == "1"
    assert own["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "300"
    assert own["HF_HUB_OFFLINE"] == "1"
    assert own["VLLM_NO_USAGE_STATS"] == "1"
    assert own["HF_HOME"] == "/models"
    assert own["PATH"] == "/envs/vllm/bin:/usr/bin"


def test_environment_of_sglang():
    own = build_sglang_environment(SGLANG, {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1"})
    assert own["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert own["HF_HUB_OFFLINE"] == "1"


def test_the_users_environment_wins():
    config = replace(VLLM, env={"HF_HUB_OFFLINE": "0", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60", "PYTHONPATH": "/plugins"})
    own = build_environment(config, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "0"})
    assert (own["HF_HUB_OFFLINE"], own["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"], own["PYTHONPATH"]) == ("0", "60", "/plugins")
    assert own["VLLM_NO_USAGE_STATS"] == "0"


def test_the_trainers_own_variables_do_not_reach_the_server():
    given = {"PYTHONPATH": "/a", "PYTHONHOME": "/b", "RANK": "1", "WORLD_SIZE": "8", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    before = dict(given)
    own = build_environment(SGLANG, {**given, "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})
    assert not set(own) & {*given, "SGLANG_RETURN_ORIGINAL_LOGPROB"}
    assert given == before


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_a_server_reaches_itself_past_a_proxy(name):
    own = build_environment(SGLANG, {"HTTP_PROXY": "http://proxy:1", name: "intern.example"})
    for key in ("no_proxy", "NO_PROXY"):
        assert {"intern.example", "127.0.0.1", "localhost"} <= set(own[key].split(","))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "tgi"}, "kind is 'tgi', expected 'sglang' or 'vllm'"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"model_path": ""}, "model_path is ''"),
        ({"python": ""}, "python is ''"),
        ({"port": 0}, "port is 0, expected 1 to 65535, or None"),
        ({"port": 65536}, "port is 65536"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"context_length": 0}, "context_length is 0"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"device": "cpu", "can_sleep": True}, "can_sleep is True, expected False on a CPU"),
        ({"extra_args": ("--port", "80")}, r"extra_args is \('--port', '80'\), expected no --port: set model_path, host and port instead"),
        ({"extra_args": ("--model=x",)}, r"extra_args is .*, expected no --model=x: set"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(VLLM, **changes)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("OSError: [Errno 98] Address already in use", "the port is in use"),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use",
            "the port is in use",
        ),
        ("api_server.py: error: unrecognized arguments: --no-such-flag", "extra_args"),
        ("launch_server.py: error: argument --dtype: invalid choice: 'float31' (choose from 'auto')", "extra_args"),
        ("/usr/bin/python: No module named 'vllm'", "not installed in this Python"),
        (
            "Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: No module named 'sglang')",
            "not installed",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "lower memory_fraction"),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "raise memory_fraction"),
        (
            "ValueError: To serve at least one request with the model's max seq len (40960), (4.38 GiB KV cache is needed, which is larger"
            " than the available KV cache memory (0.25 GiB).",
            "raise memory_fraction, or lower context_length",
        ),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "raise memory_fraction"),
        (
            "Exception: Capture cuda graph failed: CUDA out of memory. 1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
            "lower memory_fraction",
        ),
        (
            "ValueError: Free memory on device cuda:0 (12.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.92).",
            "lower memory_fraction",
        ),
        ("RuntimeError: Found no NVIDIA driver on your system.", "device to cpu"),
        ("RuntimeError: Failed to infer device type", "device to cpu"),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "device to cpu"),
        (
            "ValueError: Available memory (19/22 GiB) on startup is less than desired CPU memory utilization (0.92).",
            "lower memory_fraction",
        ),
        ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).", "lower memory_fraction"),
        ("ValueError: User-specified context_length (1000) is greater than the derived context_length (512).", "lower it"),
        ("RuntimeError: Cannot find any model weights with `/nowhere`", "config.json and weights"),
        ("OSError: /nowhere does not appear to have a file named config.json.", "config.json and weights"),
        ("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name': '/nowhere'.", "config.json and weights"),
    ],
)
def test_known_causes_are_named(line, hint):
    cause = find_cause(f"INFO starting\n{line}\nINFO bye")
    assert cause is not None
    assert hint in cause


def test_an_unknown_cause_is_not_guessed():
    assert find_cause("INFO 12:00 port 8000\nINFO dtype float32, memory 3 GiB, CUDA 13\nKeyError: 'x'") is None


def test_the_last_of_thirty_lines_are_told_with_their_place():
    text = describe_log("\n".join(f"line {i}" for i in range(100)), Path("run/vllm.log"))
    assert text.startswith("The last lines of run/vllm.log:\n    line 70\n")
    assert text.endswith("    line 99")
    assert describe_log(" \n", Path("run/vllm.log")) == "Its log run/vllm.log is empty."


def test_the_root_of_a_chain_of_exceptions_is_told_where_the_last_lines_miss_it():
    log = """
(APIServer pid=1) WARNING 11-21 system_utils.py:255] this can cause errors like `OSError: [Errno 24] Too many open files`
(Worker pid=3) ERROR 11-21 09:35:47 [multiproc_executor.py:953] RuntimeError: the root
(Worker pid=3) ERROR 11-21 09:35:48 [multiproc_executor.py:953] RuntimeError: the root
my.package.OtherError: what followed
"""
    text = describe_log(log + "a line\n" * 30, Path("log"))
    assert text.startswith(
        "Exceptions:\n    RuntimeError: the root\n    my.package.OtherError: what followed\nThe last lines of log:\n    a line"
    )
    assert "Exceptions" not in describe_log(log, Path("log"))


def test_a_kill_from_outside_is_told_from_one_by_the_server_itself():
    assert "as the kernel does when the machine's memory runs out" in describe_log("loading", Path("log"), -9)
    assert "as the kernel does when the machine's memory runs out" in describe_log("", Path("log"), -9)
    assert "kernel" not in describe_log("kill_process_tree called: parent_pid=1", Path("log"), -9)
    assert "kernel" not in describe_log("loading", Path("log"), -15)


def test_exit_statuses_in_words():
    assert describe_status(1) == "ended with exit status 1"
    assert describe_status(-9) == "was killed by signal 9 (SIGKILL)"
    assert describe_status(-11) == "was killed by signal 11 (SIGSEGV)"
    assert "unknown" in describe_status(None)


def test_a_log_is_cleaned_of_colors_and_progress_bars():
    assert clean_log(b"\x1b[1;31mbad\x1b[0m\nload 1%\rload 50%\rload 100%\ncaf\xc3\xa9 \xff\r\n") == "bad\nload 100%\ncaf\u00e9 \ufffd\n"


def test_only_the_end_of_a_log_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_text("old start\n" + "x" * 200_000 + "\nlast")
    assert len(read_log(path, 0)) == TAIL_BYTES
    path.write_text("first start\nsecond start\n")
    assert read_log(path, len("first start\n")) == "second start\n"
    assert read_log(tmp_path / "absent", 0) == ""
