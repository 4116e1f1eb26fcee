"""The user's data, and evaluation on what is held out."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.config import check_positive, check_setting

SELF_MADE_TASKS = ("sort", "sort-long", "grid_world", "calculator")  # tasks that generate their own problems


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The user's data. Built-in tasks need none; an environment may generate its own."""

    path: str | None = None  # rows to train on: a JSONL, JSON, CSV or Parquet file, a folder, or hf://ORG/NAME; None = no data
    # columns of --data.path (of --data.mixture without it) to read under another name, NEW=COLUMN: prompt=question,answer=meta.label;
    # () = all under their own names
    columns: tuple[str, ...] = ()
    # data sets to mix for SFT, without --data.path also for RL: a.jsonl 'b.jsonl(repeat=2)' 'c.jsonl(weight=0.3)'
    # 'folder(max_samples=1000, split="test", subset="main", columns="prompt=question")'; () = --data.path alone
    mixture: tuple[str, ...] = ()
    # rollouts that were generated and scored elsewhere, to train on in RL instead of generating: JSONL with tokens, log-probs and rewards
    rollouts: str | None = None
    eval_path: str | None = None  # file, folder or hf:// name of held-out rows; None = rows split off by eval_fraction
    # share of the rows that is held out without eval_path, at most evaluation.num_prompts rows, chosen by a hash of their prompts; 0 = none
    eval_fraction: float = 0.1
    streaming: bool = False  # read rows from their JSONL or Parquet files when they are needed, instead of keeping all in memory
    max_length: int | None = None  # maximum tokens of an SFT row; None = no limit
    truncate: bool = False  # truncate rows longer than max_length instead of refusing them
    skip_bad_rows: bool = False  # skip and count unreadable rows instead of ending the run

    def __post_init__(self) -> None:
        check_setting(self.max_length is None or self.max_length >= 1, "data.max_length", self.max_length, "at least 1, or None")
        check_setting(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0 and less than 1")
        if self.columns:
            from integration.expressions.mixture import parse_columns

            parse_columns(self.columns)
        if self.mixture:
            from integration.expressions.mixture import parse_mixture

            parse_mixture(self.mixture)


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Evaluation of accuracy on held-out problems."""

    num_prompts: int = 256  # held-out problems
    sampled: bool = True  # evaluate sampling at generation.temperature besides greedy decoding

    def __post_init__(self) -> None:
        check_positive(self, "num_prompts")
