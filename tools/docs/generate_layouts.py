"""Generate the tables of docs/layouts.md with the functions behind `python -m integration.train --dry-run`.

    python tools/docs/generate_layouts.py            writes the tables into the page
    python tools/docs/generate_layouts.py --check    exits 1 if they are not up to date

Models are only configurations with the sizes of the Qwen3 family; nothing is downloaded and no weights are allocated.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from integration.dry_run.layout import Workload, largest_microbatch, needed_bytes, plan_roles, plan_traffic
from integration.dry_run.memory import FLOAT, STATES
from integration.dry_run.sizes import ModelSizes, read_sizes
from integration.dry_run.text import format_bytes, read_links, read_workload
from integration.settings.command_line import parse_command_line
from integration.settings.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
GIB = 2**30
GPU_GIB = 80
FLOPS = 400e12  # achieved FLOP/s of a GPU in bfloat16: 40 % of an H100's peak

BASE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "eos_token_id": 151645, "bos_token_id": 151643}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "0.6B": BASE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                    "tie_word_embeddings": True},
    "4B": BASE | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
                  "tie_word_embeddings": True},
    "32B": BASE | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
                   "tie_word_embeddings": False},
}  # fmt: skip

COMMON = (
    "--mode rl --task jsonl --data.path mine.jsonl --model.device cuda --backend.compute-dtype bfloat16 --generation.max-tokens 4096 "
    "--rl.num-minibatches 1"
)
CHECKPOINTED = "--backend.kind fsdp --backend.fsdp.gradient-checkpointing"
HYBRID = "--backend.fsdp.sharding-strategy hybrid_shard --backend.fsdp.ranks-per-replica"


@dataclass(frozen=True)
class Layout:
    """A row of the table."""

    size: str
    model: str
    what: str
    flags: str  # flags that differ from the defaults
    servers: tuple[int, int] = (0, 1)  # (servers on GPUs of their own, GPUs of each)


LAYOUTS = (
    Layout("1 GPU", "0.6B", "one process, embedded engine", "--rl.max-tokens-per-microbatch 4096 --engine.max-slots 16"),
    Layout("1 GPU", "4B", "LoRA, embedded engine", f"{CHECKPOINTED} --backend.num-processes 1 --lora.rank 16 --engine.max-slots 8"),
    Layout("8 GPUs", "4B", "4 train, 4 serve", f"{CHECKPOINTED} --backend.num-processes 4", (4, 1)),
    Layout("8 GPUs", "32B", "LoRA: 4 train, 4 serve as one", f"{CHECKPOINTED} --backend.num-processes 4 --lora.rank 16", (1, 4)),
    Layout("8 nodes", "4B", "32 train, 32 serve", f"{CHECKPOINTED} --backend.num-processes 32", (32, 1)),
    Layout("8 nodes", "4B", "the same, a copy in each node", f"{CHECKPOINTED} --backend.num-processes 32 {HYBRID} 8", (32, 1)),
    Layout("8 nodes", "32B", "32 train, 32 serve in fours", f"{CHECKPOINTED} --backend.num-processes 32", (8, 4)),
    Layout(
        "1,000 GPUs", "32B", "256 train in 8 copies, 744 serve in fours",
        f"{CHECKPOINTED} --backend.num-processes 256 {HYBRID} 32 --rl.prompts-per-step 1024", (186, 4),
    ),
)  # fmt: skip


def read_layout(layout: Layout) -> tuple[Config, Workload]:
    """Return the settings of a layout's flags, and their workload in --dry-run."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODELS[layout.model]))
        Path(directory, "model.safetensors").touch()
        count, gpus = layout.servers
        urls = " ".join(f"http://serve{i}:8000" for i in range(count))
        engine = f"--engine.kind vllm --engine.tensor-parallel-size {gpus} --engine.urls {urls}" if count else ""
        command = parse_command_line([*COMMON.split(), "--model.path", directory, *layout.flags.split(), *engine.split()])
        return command.config, read_workload(command.config, command.mode, read_model_sizes(layout.model))


@cache
def read_model_sizes(name: str) -> ModelSizes:
    """Read the sizes of one of MODELS."""
    from transformers import Qwen3Config

    return read_sizes(Qwen3Config(**{key: value for key, value in MODELS[name].items() if key not in ("model_type", "architectures")}))


def describe_layout(layout: Layout) -> list[str]:
    """Return the cells of a layout's row."""
    config, work = read_layout(layout)
    roles = plan_roles(work)
    first = roles[0]
    states = sum(part.size for part in first.parts if part.name in STATES)
    server = next((role for role in roles if role.name.startswith("each server")), None)
    links = read_links(config.hardware)
    traffic = {entry.name: entry for entry in plan_traffic(work, links)}
    step, sync = traffic.get("an optimizer step"), traffic.get("a weight sync")
    tokens = work.step_rows * work.row_tokens
    compute_s = 8 * work.sizes.num_parameters * tokens / work.num_ranks / FLOPS
    return [
        layout.size, layout.model, layout.what,
        format_bytes(states), format_bytes(needed_bytes(work)),
        f"{largest_microbatch(work, GPU_GIB * GIB):,}",
        f"{format_bytes(step.size)}, {step.seconds:.3g} s" if step else "none",
        f"{compute_s:.3g} s",
        format_bytes(server.total()) if server else "in the process",
        f"{format_bytes(sync.size)}, {sync.seconds:.3g} s" if sync else "none",
    ]  # fmt: skip


def describe_models() -> list[str]:
    """Return a row for each model: parameters, states, weights in bfloat16, keys and values of 1,000 tokens."""
    lines = ["| model | parameters | 16 bytes each | weights in bfloat16 | root, float32 | keys and values of 1,000 tokens, bfloat16 |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name in MODELS:
        sizes = read_model_sizes(name)
        cache_size = 2 * sizes.num_layers * sizes.kv_size * 1000 * 2
        cells = (name, f"{sizes.num_parameters:,}", *map(format_bytes, (16 * sizes.num_parameters, 2 * sizes.num_parameters,
                 FLOAT * sizes.root_parameters, cache_size)))  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def create_tables() -> dict[str, list[str]]:
    """Return the lines of each table, by name."""
    heads = ("size", "model", "GPUs", "states of a GPU", "fullest training GPU", "largest micro-batch", "received in a step", "computation",
             "a server's GPU", "a weight sync")  # fmt: skip
    rows = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    rows += ["| " + " | ".join(describe_layout(layout)) + " |" for layout in LAYOUTS]
    flags = ["| size | model | flags beside the common ones |", "| --- | --- | --- |"]
    flags += [f"| {layout.size} | {layout.model} | `{layout.flags}` |" for layout in LAYOUTS]
    return {"models": describe_models(), "layouts": rows, "flags": flags}


def fill_page(text: str, tables: dict[str, list[str]]) -> str:
    """Return the page with each table between its marks."""
    for name, lines in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        assert len(pattern.findall(text)) == 1, f"{PAGE} has not one place for the table {name}"
        text = pattern.sub(lambda found, lines=lines: found[1] + "\n".join(lines) + "\n" + found[2], text)
    return text


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = PAGE.read_text()
    filled = fill_page(text, create_tables())
    if arguments.check:
        return int(filled != text)
    PAGE.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
