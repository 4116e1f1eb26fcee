"""The state of a run in a checkpoint: what is written is read back, older schemas are migrated, everything else is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from rollouts.errors import CheckpointError
from rollouts.training.saving.checkpoints import save_checkpoint
from rollouts.training.saving.run_state import MIGRATIONS, SCHEMA, FileMark, RunInputs, RunState, parse_run_state, read_run_state

BEST = {"metric": "eval_loss", "value": 0.5, "step": 2, "num_since": 1}
INPUTS = RunInputs(data={"data.path": FileMark(size=3, hash="ab")}, settings={"seed": "00000001"})
STATE = RunState(
    stage="rl",
    step=3,
    metrics_bytes=10,
    metrics={"loss": 1.0},
    rollouts={"buffer": {}},
    weight_version=3,
    kl_coef=0.1,
    best=BEST,
    inputs=INPUTS,
)


async def nothing(directory: Path) -> None:
    del directory


async def write(directory: Path, raw: dict) -> Path:
    return await save_checkpoint(directory, 3, write=nothing, run_state=raw)


async def test_a_written_state_is_read_back(tmp_path: Path):
    assert read_run_state(await write(tmp_path, STATE.to_dict())) == STATE
    assert json.loads((tmp_path / "step_0003/run_state.json").read_text())["schema"] == SCHEMA


OLD = {
    "sft": {"step": 4, "stage": "sft", "metrics_bytes": 12, "num_rows": 9, "best": None},
    "reward_model": {"step": 4, "stage": "reward_model", "metrics_bytes": None, "best": BEST},
    "rl": {
        "step": 4,
        "stage": "rl",
        "rollouts": {"num_batches": 4},
        "metrics": {"loss": 0.5},
        "metrics_bytes": 7,
        "weight_version": 4,
        "kl_coef": None,
        "best": None,
    },
}


@pytest.mark.parametrize("stage", OLD)
def test_a_state_of_schema_1_is_read_with_all_that_it_had(stage: str):
    state = parse_run_state(OLD[stage], "f")
    known = {field.name: getattr(state, field.name) for field in fields(state)}
    assert {name: known[name] for name in OLD[stage]} == OLD[stage]
    assert all(value is None for name, value in known.items() if name not in OLD[stage])


def test_migrations_lead_from_every_schema_to_the_newest_and_change_no_argument():
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA))
    raw = dict(OLD["rl"])
    MIGRATIONS[1](raw)
    assert raw == OLD["rl"]


def spoil(**changes: object) -> dict:
    raw = {**STATE.to_dict(), **changes}
    return {name: value for name, value in raw.items() if value is not ...}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (spoil(schema=SCHEMA + 1), f"has schema {SCHEMA + 1}, but this version of rollouts reads schemas up to {SCHEMA}: a newer version"),
        (spoil(schema="2"), "has the schema '2'"),
        (spoil(schema=True), "has the schema True"),
        (spoil(step=...), "lacks the key 'step'"),
        (spoil(kl_coef=...), "lacks the key 'kl_coef'"),
        (spoil(kl_coeff=1.0), "has the key 'kl_coeff', which schema 2 does not know"),
        (spoil(step="3"), "the key 'step' has the value '3', expected int"),
        (spoil(step=True), "the key 'step' has the value 'True'"),
        (spoil(step=-1), "has the step -1"),
        (spoil(rollouts=None), "is of stage rl, but its key 'rollouts' is null"),
        (spoil(rollouts=[1]), "the key 'rollouts' has the value '[1]', expected dict or null"),
        (spoil(best={"metric": "m"}), "f, best lacks the key 'value'"),
        (spoil(inputs={"data": {}}), "f, inputs lacks the key 'settings'"),
        (spoil(inputs={"data": {"a": {"size": 1}}, "settings": {}}), "f, inputs, data, a lacks the key 'hash'"),
        ({"stage": "sft"}, "lacks the key 'step'"),
        ([], "holds list, expected a JSON object"),
    ],
)
def test_what_is_no_state_is_refused_with_file_and_key(raw: object, words: str):
    with pytest.raises(CheckpointError) as caught:
        parse_run_state(raw, "f")
    assert str(caught.value).startswith("f")
    assert words in str(caught.value)
    assert "restore the checkpoint" in str(caught.value) or "newer version" in str(caught.value)


async def test_a_file_that_is_no_json_is_refused_with_its_name(tmp_path: Path):
    async def spoil_later(directory: Path) -> None:
        (directory / "weights").write_text("w")

    path = await save_checkpoint(tmp_path, 3, write=spoil_later, run_state=STATE.to_dict())
    (path / "run_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run_state\.json"):
        read_run_state(path)
