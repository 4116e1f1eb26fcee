"""TRL's SFTTrainer as a contender of benchmarks.run. Needs trl."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence

from benchmarks.measure import MODEL_SIZES, create_model
from rollouts.types import Sample

MAX_LENGTH = 512


class TRLTraining:
    """One epoch over batches with SFTTrainer, padded or packed into rows of 512 tokens."""

    def __init__(self, size: str, batches: Sequence[Sequence[Sample]], *, packing: bool) -> None:
        self.size, self.packing = size, packing
        self.rows = [list(sample.tokens) for batch in batches for sample in batch]
        self.batch_size = max(1, round(sum(map(len, self.rows)) / len(batches) / MAX_LENGTH)) if packing else len(batches[0])
        self.cpu_s = 0.0
        """Processor seconds in train(), of all runs together."""

    def run(self) -> int:
        """Make a model and a trainer, and train. Returns the tokens of all rows."""
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        logging.disable(logging.WARNING)
        words = {"<pad>": 0, "<eos>": 1} | {f"<{i}>": i for i in range(2, MODEL_SIZES[self.size]["vocab_size"])}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<2>")), pad_token="<pad>", eos_token="<eos>"
        )
        with tempfile.TemporaryDirectory() as folder:
            settings = SFTConfig(
                output_dir=folder, per_device_train_batch_size=self.batch_size, num_train_epochs=1, max_length=MAX_LENGTH,
                packing=self.packing, report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
                gradient_checkpointing=False, learning_rate=1e-4,
            )  # fmt: skip
            data = Dataset.from_dict({"input_ids": self.rows})
            trainer = SFTTrainer(model=create_model(self.size), args=settings, train_dataset=data, processing_class=tokenizer)
            started = time.process_time()
            trainer.train()
            self.cpu_s += time.process_time() - started
        return sum(map(len, self.rows))
