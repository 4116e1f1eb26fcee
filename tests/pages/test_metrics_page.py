"""docs/metrics.md has every key that runs write into metrics.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from forked import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
CODE = "import sys\nfrom integration.train import main\nsys.exit(main(sys.argv[1:]))"
SHORT = "--sft.num-steps 2 --rl.num-steps 2 --rl.prompts-per-step 8 --evaluation.num-prompts 4 --quiet"
RUNS = {
    "grpo": "--mode sft+rl --rl.filter min_reward(0.0) --rl.algorithm grpo(kl_coef=0.02,entropy_coef=0.001)",
    "ppo": "--mode rl --rl.algorithm ppo(kl_coef=0.02) --rl.kl-control.target 0.1",
    "async": "--mode rl --rl.algorithm decoupled(dapo(clip_high=0.28),cap=5.0) --rl.asynchronous.enabled --rl.asynchronous.max-staleness 2",
    "segment-wise": "--mode rl --rl.asynchronous.enabled --rl.asynchronous.max-staleness 2 --enable-segment-wise-ppo",
    "online_dpo": "--mode rl --rl.algorithm online_dpo",
    "gigpo": "--task grid_world --rl.algorithm gigpo",
    "tools": "--task calculator",
}


def read_rows() -> list[tuple[list[str], str, str, str]]:
    """Keys, unit, meaning and advice of each row of the page's tables."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", keys), unit, meaning, advice) for keys, unit, meaning, advice in cells]


def read_keys() -> list[str]:
    """Each key of the page."""
    return [key for keys, *_ in read_rows() for key in keys]


def is_known(key: str, known: list[str]) -> bool:
    patterns = (re.escape(name).replace("<k>", r"\w+").replace("<reason>", r"\w+").replace("NAME", ".+") for name in known)
    return any(re.fullmatch(pattern, key) for pattern in patterns)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_key_that_a_run_writes_stands_on_the_page(name: str, tmp_path: Path):
    arguments = [*SHORT.split(), *RUNS[name].split(), "--output-dir", str(tmp_path / "run")]
    status, _, error = run(CODE, *arguments, folder=tmp_path / "process")
    assert status == 0, error[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) >= 2
    unknown = sorted({key for line in lines for key in line if not is_known(key, read_keys())})
    assert not unknown, f"docs/metrics.md does not say what {unknown} mean: add rows with unit, meaning, healthy values and advice"


def test_every_key_of_the_page_stands_in_the_code():
    """As a whole, or after a prefix that the code puts before others' keys."""
    code = "\n".join(path.read_text() for folder in ("rollouts", "integration") for path in (ROOT / folder).rglob("*.py"))
    words, quoted = set(re.findall(r"\w+", code)), set(re.findall(r"[\"'](\w+)", code))

    def stands(key: str) -> bool:
        begun, rest = key.partition("<")[0].partition("/")[0], key
        for prefix in ("eval_", "critic_", "num_groups_", "num_", "max_"):
            rest = rest.removeprefix(prefix)
        return begun in words or begun in quoted or rest in quoted or rest.upper() in words

    wrong = [key for key in read_keys() if not stands(key)]
    assert not wrong, f"nobody writes {wrong}"


def test_the_page_has_a_meaning_for_each_key_and_names_none_twice():
    keys = read_keys()
    assert len(keys) > 100 and len(keys) == len(set(keys)), sorted({key for key in keys if keys.count(key) > 1})
    assert all(meaning for _, _, meaning, _ in read_rows())
    assert sum(bool(advice) for *_, advice in read_rows()) > 0.7 * len(read_rows())
    assert not is_known("no_such_key", keys) and is_known("staleness_2", keys)
