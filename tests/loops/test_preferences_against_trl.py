"""Ten steps on the same pairs by TRL's DPOTrainer and by our loop: the same losses and norms of the gradient, step by step."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import needs
import pytest
from trl_preferences import BATCH_SIZE, NUM_STEPS

from rollouts.algorithms import preference_objectives as objectives
from rollouts.backends.factory import create_pytorch_backend, create_reference_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import PreferenceTrainingConfig
from rollouts.data.preference_pairs import prepare_preference_pair
from rollouts.data.prompts import stream_positions
from rollouts.models.loading import load_hf_model
from rollouts.preference_loop import PreferenceParts, train_preferences
from rollouts.testing import create_tiny_model

JOBS = {
    "dpo": ({"loss_type": "sigmoid", "beta": 0.3}, objectives.dpo(beta=0.3)),
    "ipo": ({"loss_type": "ipo", "beta": 0.3}, objectives.ipo(beta=0.3)),
    "slic": ({"loss_type": "hinge", "beta": 0.3}, objectives.slic(beta=0.3)),
    "robust": ({"loss_type": "robust", "beta": 0.3, "label_smoothing": 0.1}, objectives.robust_dpo(beta=0.3)),
}
NUM_PAIRS = 16
SCRIPT = Path(__file__).parents[1] / "support" / "trl_preferences.py"


def make_row(row: int) -> dict[str, str]:
    """A pair of answers of different lengths."""
    return {"prompt": f"{row}=", "chosen": "x" * (row % 4) + str(row % 5), "rejected": "y" * (row % 3) + str(5 + row % 5)}


@needs.TRL
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ten_steps_are_those_of_the_dpo_trainer(tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path / "model")
    create_char_tokenizer().save_pretrained(tmp_path / "model")
    rows = [make_row(row) for row in range(NUM_PAIRS)]
    order = stream_positions(NUM_PAIRS, start=0, count=NUM_STEPS * BATCH_SIZE, seed=0)  # the rows in the order in which our loop takes them
    (tmp_path / "pairs.json").write_text(json.dumps([rows[position] for position in order]))
    (tmp_path / "jobs.json").write_text(json.dumps({name: options for name, (options, _) in JOBS.items()}))
    python = os.environ["TRL_PYTHON"]
    done = subprocess.run([python, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / "history.json").read_text())
    pairs = [prepare_preference_pair(create_char_tokenizer(), row, whole_answers=True) for row in rows]
    config = PreferenceTrainingConfig(num_steps=NUM_STEPS, batch_size=BATCH_SIZE)
    for name, (_, objective) in JOBS.items():
        policy = create_pytorch_backend(load_hf_model(tmp_path / "model"), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1e9)
        reference = create_reference_backend(load_hf_model(tmp_path / "model"))
        ours = await train_preferences(PreferenceParts(backend=policy, reference=reference), pairs, objective, config)
        assert len(theirs[name]) == NUM_STEPS
        for step, line in enumerate(ours):
            assert [line["loss"], line["grad_norm"]] == pytest.approx(theirs[name][step], rel=1e-5, abs=1e-5), f"{name}, step {step}"
