"""Ten steps of TRL's DPOTrainer on given pairs: `python trl_preferences.py FOLDER`, with the Python of an environment with TRL.

FOLDER has model/ (with its tokenizer), pairs.json (texts) and jobs.json (names and arguments of DPOConfig); history.json gets the loss
and the norm of the gradient of each step of each job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_STEPS, BATCH_SIZE = 10, 4


def main(folder: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    pairs = json.loads((folder / "pairs.json").read_text())
    histories: dict[str, list[list[float]]] = {}
    for name, options in json.loads((folder / "jobs.json").read_text()).items():
        args = DPOConfig(
            output_dir=str(folder / "trl"), seed=0, max_steps=NUM_STEPS, per_device_train_batch_size=BATCH_SIZE, learning_rate=1e-3,
            lr_scheduler_type="constant", adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1e9, logging_steps=1, use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, max_length=None,
            train_sampling_strategy="sequential", disable_dropout=True, logging_nan_inf_filter=False, **options,
        )  # fmt: skip
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "model"),
            ref_model=AutoModelForCausalLM.from_pretrained(folder / "model"),
            args=args,
            train_dataset=Dataset.from_list(pairs),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        )
        losses: list[float] = []
        compute = trainer.compute_loss

        def keep(*given: object, compute=compute, losses=losses, **named: object) -> object:
            loss = compute(*given, **named)
            losses.append(float(loss[0] if isinstance(loss, tuple) else loss))  # the log rounds to four digits
            return loss

        trainer.compute_loss = keep
        norms: list[float] = []
        clip = trainer.accelerator.clip_grad_norm_

        def keep_norm(*given: object, clip=clip, norms=norms, **named: object) -> object:
            norm = clip(*given, **named)
            norms.append(float(norm))
            return norm

        trainer.accelerator.clip_grad_norm_ = keep_norm
        trainer.train()
        histories[name] = [list(step) for step in zip(losses, norms, strict=True)]
    (folder / "history.json").write_text(json.dumps(histories))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
