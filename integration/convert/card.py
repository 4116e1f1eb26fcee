"""The model card of an exported model: README.md in the form that the Hugging Face hub shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.run.directory import read_facts
from integration.settings.command_line import CONFIG_FILE, read_saved
from integration.settings.config import Config
from integration.settings.option_effects import find_changes, list_options
from integration.settings.paths import PATHS, strip_directories
from integration.settings.task_defaults import find_default
from rollouts.config_files import read_json
from rollouts.errors import make_safe, redact

CARD_FILE = "README.md"
_SECTIONS = ("engine", "hardware", "output_dir", "num_threads", "profile", "trajectories", "loggers", "logger_timeout_s")
"""Settings about the machine rather than the model; addresses and paths of one's own are not published."""


def describe_model(run: Path | None, checkpoint: Path, name: str | None = None) -> str:
    """Return the text of a model card: base model, data, reward, algorithm, results and settings of the run.

    Args:
        run: directory of the run; None = unknown.
        checkpoint: the exported checkpoint.
        name: name of the model on the hub.
    """
    if run is None or not (run / CONFIG_FILE).is_file():
        return _write({"library_name": "transformers"}, name or checkpoint.name, ["Converted by `rollouts convert`."])
    saved = read_json(run / CONFIG_FILE)
    if "rl" not in saved:  # the run of a reward model
        facts = {"library_name": "transformers", "tags": ["rollouts", "reward-model"]}
        return _write(facts, name or run.name, ["A reward model, trained on pairs of answers by `rollouts train-reward-model`."])
    config, mode = read_saved(Config, run / CONFIG_FILE), str(read_facts(run).get("mode", "sft+rl"))
    results = read_json(run / "summary.json") if (run / "summary.json").is_file() else {}
    base = _name_model(config.model.path)
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["rollouts", *mode.split("+")], "pipeline_tag": "text-generation"}
    if config.model.path is not None and base == config.model.path:
        front["base_model"] = base
    lines = [
        f"Trained by [rollouts](https://pypi.org/project/rollouts-rl/): {mode.upper()} of {base}"
        + (f", revision {config.model.revision}" if config.model.revision else "")
        + f"; checkpoint `{checkpoint.parent.parent.name}/{checkpoint.name}`.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {_cell(value)} |" for key, value in _list_facts(config, mode).items()),
        "",
        "## Results",
        "",
        *(_list_results(results) or ["The run had not ended when this model was exported."]),
        "",
        "## Settings",
        "",
        "Those that are not the defaults of the task and the model:",
        "",
        "```toml",
        *_list_settings(config),
        "```",
    ]
    return make_safe(redact(_write(front, name or run.name, lines)))


def _write(front: Mapping[str, Any], title: str, lines: list[str]) -> str:
    head = [f"{key}: {json.dumps(value)}" for key, value in front.items()]
    return "\n".join(["---", *head, "---", "", f"# {title}", "", *lines]) + "\n"


def _list_facts(config: Config, mode: str) -> dict[str, str]:
    """Return data, reward and algorithm by name."""
    files = [*filter(None, [_public("data.path", config.data.path)]), *_public("data.mixture", config.data.mixture)]
    data = ", ".join(files) or f"made by the task {config.task}"
    facts = {"task": config.task, "data": data, "seed": str(config.seed)}
    if "rl" in mode:
        own, model = _public("reward.function", config.reward.function), _public("reward.model", config.reward.model)
        reward = own or model or "that of the task"
        facts |= {"reward": reward, "algorithm": config.rl.algorithm, "prompts per step": str(config.rl.prompts_per_step)}
        facts["samples per prompt"] = str(config.rl.samples_per_prompt)
    if config.lora.rank:
        facts["adapters"] = f"rank {config.lora.rank}, merged into the weights"
    return facts


def _list_results(results: Mapping[str, Any]) -> list[str]:
    """Return the rows of a table of the run's held-out results; [] without any."""
    keys = [key for key in results if "_before" in key or "_after_" in key]
    rows = [f"| {key.replace('_', ' ')} | {results[key]:.4g} |" for key in keys if isinstance(results[key], int | float)]
    warnings = [f"- {text}" for text in results.get("warnings") or ()]
    return [*(["| held-out | |", "|---|---|", *rows] if rows else []), *(["", *warnings] if warnings else [])]


def _list_settings(config: Config) -> list[str]:
    changed = find_changes(config, find_default(config))
    shown = [(name, value) for name, value in list_options(config) if name in changed and not name.startswith(_SECTIONS)]
    return [f"{name} = {_toml(_public(name, value))}" for name, value in shown] or ["# none"]


def _public(name: str, value: Any) -> Any:
    """Return a value without directories of one's own: the last part of paths."""
    if name == "model.path" or name not in PATHS or not isinstance(value, str | tuple):
        return _name_model(value) if name == "model.path" else value
    return strip_directories(name, value) if isinstance(value, str) else [strip_directories(name, text) for text in value]


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _name_model(path: str | None) -> str:
    if path is None:
        return "the built-in model"
    return path if path.count("/") == 1 and not path.startswith((".", "/", "~")) else strip_directories("model.path", path)


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
