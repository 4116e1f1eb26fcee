"""All that reads what others write, as functions of bytes, each with examples to begin from: they may raise errors of the library alone."""

from __future__ import annotations

import base64
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.reliability import mcp_messages
from integration.report.runs import read_run
from integration.settings.command_line import find_run, read_config_file, read_saved_mode, read_settings
from integration.settings.config import Config
from integration.settings.log_levels import read_warnings
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.datasets import load_rl_prompts, load_sft_conversations
from rollouts.data.preference_pairs import load_labelled_answers, load_preference_pairs
from rollouts.data.trajectories import measure_groups, read_records, read_samples, read_steps
from rollouts.engines.http.errors import create_status_error, parse_answer
from rollouts.engines.http.events import parse_event
from rollouts.engines.http.messages import parse_usual_answer
from rollouts.engines.http.requests import WireRequest
from rollouts.engines.sglang import protocol as sglang
from rollouts.engines.text import protocol as openai
from rollouts.engines.vllm import protocol as vllm
from rollouts.engines.weights.checkpoint_check import read_checkpoint_layout, read_eos_token_ids, read_vocab_size, read_weight_version
from rollouts.environments.tools.calls import ToolCall, create_compact_parser, parse_hermes_calls, parse_json_calls, strip_thinking
from rollouts.environments.tools.tool import create_tool, fit_arguments
from rollouts.errors import RolloutsError
from rollouts.gateway.refusals import parse_body
from rollouts.gateway.server import DIALECTS
from rollouts.training.metrics import JSONLLogger, read_metrics, truncate_log
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import parse_run_state, read_run_state
from rollouts.types import SamplingParams

URL = httpx.URL("http://server/")
TOKENS = (3, 4, 5)
REQUEST = WireRequest("r", TOKENS, SamplingParams(max_tokens=4), 1)


@dataclass(frozen=True)
class Parser:
    """Function that reads bytes of others."""

    name: str
    read: Callable[[bytes], object]
    examples: Sequence[bytes]
    raises: tuple[type[Exception], ...] = field(default=(RolloutsError,))  # what it may raise

    def try_on(self, data: bytes) -> bool:
        """Read the data. Returns whether they were accepted; raises all that must not be raised."""
        try:
            self.read(data)
        except self.raises:
            return False
        return True


def add(a: int, b: float = 0.0, names: list[str] | None = None) -> float:
    """Add numbers."""
    return a + b + len(names or ())


def _encode(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def _from_json(name: str, parse: Callable[[Any], object], *examples: Any) -> Parser:
    return Parser(name, lambda data: parse(parse_answer(data, URL)), _encode(*examples))


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="parsers-")


def _folder() -> Path:
    return Path(_directory().name)


def _from_file(name: str, file: str, read: Callable[[Path], object], *examples: bytes) -> Parser:
    def read_bytes(data: bytes) -> object:
        path = _folder() / file
        path.write_bytes(data)
        return read(path)

    return Parser(name, read_bytes, examples)


def _npy(*shape: int) -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(shape, dtype=np.int16))
    return base64.b64encode(buffer.getvalue()).decode()


def _engine_answers() -> tuple[Parser, ...]:
    spans = [{"version": "0", "start": 0, "end": 2}]
    choice = {
        "index": 0, "token_ids": [7, 8], "finish_reason": "stop", "weight_versions": spans, "routed_experts": _npy(4, 2, 1),
        "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.5}]},
    }  # fmt: skip
    answer = {"request_id": vllm.ID_PREFIX + "r", "choices": [choice], "usage": {"prompt_tokens": 3}}
    prompt = {"prompt_logprobs": [None, {"4": {"logprob": -1.0}}, {"5": {"logprob": -2.0}}], "choices": [{"finish_reason": "length"}]}
    config = {
        "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "skip_tokenizer_init": False},
        "device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": True, "max_num_seqs": 4},
    }  # fmt: skip
    cards = {"data": [{"root": "m", "id": "m", "max_model_len": 64, "owned_by": "vllm"}]}
    facts = [{"vllm_config": config}, cards, {"version": "0.11.0"}, {"weight_version": "0"}, {"is_paused": False}]
    meta = {
        "id": "r", "finish_reason": {"type": "stop"}, "weight_versions": spans, "prompt_tokens": 3,
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]], "routed_experts": base64.b64encode(b"\1\0\0\0" * 8).decode(),
    }  # fmt: skip
    running = {"output_ids": [7, 8], "meta_info": {**meta, "finish_reason": None}}
    scored = {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": [[None, 3], [-1.0, 4], [-1.0, 5]]}}
    sglang_facts = [
        {"max_req_input_len": 60, "version": "0.5", "dtype": "auto", "skip_tokenizer_init": True, "enable_deterministic_inference": False,
         "max_running_requests": 4, "tp_size": 1, "dp_size": 1, "incremental_streaming_output": False},
        {"model_path": "m", "served_model_name": "m", "weight_version": "0", "preferred_sampling_params": '{"top_k": 3}'}, cards,
    ]  # fmt: skip
    top = [{"meta_info": {"output_top_logprobs": [[[-0.1 * t, 1], [-1.1 * t, 2]]]}} for t in (1, 2)]
    ended = {"output_ids": [7, 8], "meta_info": meta}
    return (
        _from_json("vllm generate", lambda a: vllm.parse_vllm_response(a, REQUEST), answer),
        _from_json("vllm experts", lambda a: vllm.parse_vllm_response(a, REQUEST, with_experts=True), answer),
        _from_json("vllm scores", lambda a: vllm.parse_prompt_log_probs(a, TOKENS, 1), prompt),
        _from_json("vllm facts", lambda a: vllm.parse_server_info(*[*(a if isinstance(a, list) else [a]), *[None] * 5][:5]), facts),
        _from_json("vllm load", vllm.parse_load_answer, {"results": [None]}),
        _from_json("sglang generate", lambda a: sglang.parse_sglang_response(a, ["r"]), ended, [ended]),
        _from_json("sglang experts", lambda a: sglang.parse_sglang_response(a, ["r"], 1), ended),
        _from_json("sglang event", lambda a: sglang.parse_sglang_event(a, "r"), running, ended),
        _from_json("sglang scores", lambda a: sglang.parse_prompt_log_probs(a, TOKENS, 1, 64), scored),
        _from_json(
            "sglang facts", lambda a: sglang.parse_server_info(*[*(a if isinstance(a, list) else [a]), *[None] * 3][:3]), sglang_facts
        ),
        _from_json("sglang defaults", sglang.find_foreign_defaults, sglang_facts[1]),
        _from_json("sglang probe", sglang.parse_probe, top),
        _from_json("sglang update", partial(sglang.parse_update_answer, "/update"), {"success": True}),
    )


def _texts() -> tuple[Parser, ...]:
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "x", "reasoning_content": "y", "refusal": None, "tool_calls": [call]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    answer = {"model": "m", "usage": usage, "choices": [{"finish_reason": "stop", "message": message}]}
    chunk = {"model": "m", "usage": usage, "choices": [{"finish_reason": "stop", "delta": message}]}
    problem = {"detail": [{"loc": ["body", "n"], "msg": "too large"}]}
    dump = "1 validation error: [{'type': 'x', 'loc': ('a', 'b'), 'msg': 'wrong', 'input': 3}]"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    return (
        _from_json("openai models", openai.parse_models, {"data": [{"id": "m", "owned_by": "vllm"}]}),
        _from_json("openai answer", openai.parse_chat_response, answer),
        _from_json("openai delta", openai.parse_text_delta, chunk),
        _from_json(
            "openai stream", lambda a: openai.parse_chat_response(openai.join_chunks(a if isinstance(a, list) else [a])), [chunk, chunk]
        ),
        Parser("event", lambda data: parse_event(data.decode(errors="replace"), URL), _encode({"error": {"code": 400, "message": "m"}})),
        Parser(
            "error body", lambda data: str(create_status_error(400, URL, data.decode(errors="replace"))),
            [*_encode(problem, {"error": {"message": dump}}), dump.encode()],
        ),
        Parser("http head", parse_usual_answer, [head]),
    )  # fmt: skip


def _rows() -> tuple[Parser, ...]:
    tokenizer = create_char_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: Sequence[Mapping[str, Any]] = (
        {"messages": messages, "tools": []}, {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "input": "b", "output": "c"}, {"prompt": "a", "completion": "b"}, {"question": "a", "answer": "b #### 3"},
        {"prompt": messages[:1], "chosen": messages[1:], "rejected": [{"role": "assistant", "content": "c"}]},
        {"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "reward_model": {"ground_truth": "3"}}, {"text": "a"},
    )  # fmt: skip
    lines = tuple(line + b"\n" for line in _encode(*rows))
    table = b'prompt,completion,label\na,"b",true\n'
    load: dict[str, tuple[Callable[[Path], object], str]] = {
        "sft": (load_sft_conversations, "jsonl"), "prompts": (load_rl_prompts, "jsonl"),
        "pairs": (lambda path: load_preference_pairs(tokenizer, path), "jsonl"),
        "labels": (lambda path: load_labelled_answers(tokenizer, path), "jsonl"),
    }  # fmt: skip
    found = [_from_file(f"rows {name}", f"{name}.jsonl", read, *lines) for name, (read, _) in load.items()]
    whole = _encode(*([row] for row in rows))
    found.append(_from_file("rows json", "rows.json", load_sft_conversations, *whole))
    found.append(_from_file("rows csv", "rows.csv", load_sft_conversations, table))
    found.append(_from_file("rows parquet", "rows.parquet", load_sft_conversations, b"PAR1" + b"\0" * 20 + b"PAR1"))
    return tuple(found)


def _settings() -> tuple[Parser, ...]:
    default = Config()
    toml = b'seed = 3\ntask = "sort"\n[rl]\nnum_steps = 5\nalgorithm = "grpo()"\n[rl.optimizer]\nlr = 1e-3\n[generation]\nstop = ["a"]\n'
    saved = _encode({"seed": 3, "rl": {"num_steps": 5, "optimizer": {"lr": 0.001}}, "generation": {"stop": ["a"]}})
    return (
        _from_file("settings toml", "settings.toml", lambda path: read_config_file(path, default), toml),
        _from_file("settings json", "settings.json", lambda path: read_config_file(path, default), *saved),
        _from_file("settings read", "read.toml", read_settings, toml),
        _from_file("mode", "run.json", lambda path: read_saved_mode(path.parent), *_encode({"mode": "rl"})),
    )


def _calls() -> tuple[Parser, ...]:
    tool = create_tool(add)
    compact = create_compact_parser([tool])

    def read(data: bytes) -> None:
        text = data.decode(errors="replace")
        for parse in (parse_hermes_calls, parse_json_calls, compact):
            for call in parse(strip_thinking(text)):
                if isinstance(call, ToolCall):
                    fit_arguments(tool, call.arguments)

    call = b'{"name": "add", "arguments": {"a": 1, "b": 2.5, "names": ["x"]}}'
    examples = (call, b"<think>t</think><tool_call>" + call + b"</tool_call>", b'add(1, b=2.5, names=["x"])')
    return (Parser("tool calls", read, examples, (ValueError,)),)


def _write_checkpoint(folder: Path, data: bytes, file: str) -> Path:
    """Write a checkpoint of two files, one of them with these data, whose manifest fits."""
    path = folder / "checkpoints" / "step_0001"
    path.mkdir(parents=True, exist_ok=True)
    contents = {"run_state.json": STATE, "weights.json": b"{}"} | ({} if file == "manifest.json" else {file: data})
    for name, content in contents.items():
        (path / name).write_bytes(content)
    entries = {name: {"size": len(content), "crc32": zlib.crc32(content)} for name, content in contents.items()}
    (path / "manifest.json").write_bytes(data if file == "manifest.json" else json.dumps({"files": entries}).encode())
    return path


STATE = json.dumps({
    "schema": 2, "stage": "rl", "step": 1, "metrics_bytes": 3, "metrics": {"loss": 1.0}, "rollouts": {"buffer": {}}, "weight_version": 1,
    "kl_coef": 0.1, "num_rows": None, "best": {"metric": "eval_loss", "value": 1.0, "step": 1, "num_since": 0},
    "inputs": {"data": {"a": {"size": 3, "hash": "x"}}, "settings": {"seed": "1"}},
}).encode()  # fmt: skip


def _checkpoints() -> tuple[Parser, ...]:
    entry = {"size": len(STATE), "crc32": zlib.crc32(STATE)}
    manifest = _encode({"files": {"run_state.json": entry, "weights.json": {"size": 2, "crc32": zlib.crc32(b"{}")}}})
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    safetensors = len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
    index = _encode({"metadata": {}, "weight_map": {"w": "model.safetensors"}})

    def read_all(path: Path) -> None:
        read_weight_version(path)
        read_vocab_size(path)
        read_eos_token_ids(path)

    def layout(data: bytes, file: str) -> object:
        path = _folder() / f"weights-{file}"
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(safetensors)
        (path / file).write_bytes(data)
        return read_checkpoint_layout(path)

    return (
        Parser("run state", lambda data: parse_run_state(parse_answer(data, URL), "run_state.json"), [STATE]),
        Parser("run state of a checkpoint", lambda data: read_run_state(_write_checkpoint(_folder(), data, "run_state.json")), [STATE]),
        Parser("manifest", lambda data: latest_checkpoint(_write_checkpoint(_folder(), data, "manifest.json").parent), manifest),
        Parser("weights", partial(layout, file="model.safetensors"), [safetensors]),
        Parser("index of weights", partial(layout, file="model.safetensors.index.json"), index),
        _from_file("weight version", "weight_version.json", lambda path: read_all(path.parent), *_encode({"weight_version": 3})),
        _from_file(
            "config of a model", "config.json", lambda path: read_all(path.parent), *_encode({"vocab_size": 3, "eos_token_id": [1]})
        ),
    )


def _records() -> tuple[Parser, ...]:
    sample = {
        "group_index": 0, "index": 0, "prompt": "a", "tokens": [3, 4], "response": "b", "loss_mask": [0.0, 1.0], "reward": 1.0,
        "rollout_log_probs": [0.0, -1.0], "weight_versions": [0, 0], "status": "completed", "turns": [{"start": 1, "end": 2}],
        "metadata": {"truth": "b"},
    }  # fmt: skip
    messages = {**sample, "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    step = {"step_index": 0, "group_index": 0, "sample_index": 0, "observation": "a", "action": "b", "reward": 1.0, "step_info": {}}
    lines = tuple(line + b"\n" for line in _encode(sample, messages, step))

    def read(path: Path) -> None:
        for one in (read_samples, read_steps, read_records, measure_groups):
            one(path)

    def go_on(path: Path) -> None:
        read_metrics(path)
        JSONLLogger(path)
        truncate_log(path, 10)

    def report(path: Path) -> None:
        find_run(path)
        read_run(path.parent)

    folder = _folder() / "run"
    folder.mkdir(exist_ok=True)
    metrics = b'{"step": 1, "stage": "rl", "loss": 1.0}\n{"step": 2, "stage": "rl", "loss": "NaN"}\n'
    warning = b'{"time": 1.0, "text": "a"}\n{"kind": "b", "text": "c"}\n'
    return (
        *(_from_file(f"transcripts {one.__name__}", "samples.jsonl", one, *lines) for one in (read_samples, read_steps, read_records)),
        _from_file("transcripts all", "samples.jsonl", read, *lines),
        _from_file("metrics.jsonl", "metrics.jsonl", go_on, metrics),
        _from_file("metrics.jsonl of a report", "run/metrics.jsonl", report, metrics),
        _from_file("warnings.jsonl", "warnings.jsonl", read_warnings, warning),
    )


def _requests() -> tuple[Parser, ...]:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "y"},
    ]
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    chat = {"model": "m", "messages": messages, "max_tokens": 2, "temperature": 1.0, "stop": ["#"], "seed": 1, "logprobs": True}
    message = {
        "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["#"],
        "messages": [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "z"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    }  # fmt: skip
    response = {"model": "m", "input": [{"role": "user", "content": "x"}], "max_output_tokens": 2, "temperature": 1.0}
    examples = _encode(response, chat, {"model": "m", "prompt": "x", "max_tokens": 2, "logprobs": 0}, message)
    return tuple(
        Parser(f"request {path}", lambda data, dialect=dialect: dialect.read(parse_body(data)), examples)
        for path, dialect in sorted(DIALECTS.items())
    )


def _tool_servers() -> tuple[Parser, ...]:
    messages = mcp_messages.USUAL.items() if mcp_messages.IS_INSTALLED else ()
    return tuple(Parser(f"mcp {method}", partial(mcp_messages.converse, method), _encode(*found)) for method, found in messages)


@cache
def list_parsers() -> tuple[Parser, ...]:
    """Return all parsers, those of MCP where its package is installed."""
    read = (*_engine_answers(), *_texts(), *_rows(), *_settings(), *_calls(), *_checkpoints(), *_records(), *_requests())
    return (*read, *_tool_servers())
