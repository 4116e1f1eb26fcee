"""Compare families of transformers, as tiny random models, with transformers' own forward pass, and write the tables of docs/models.md.

python tools/docs/generate_models.py           writes the tables, about six minutes
python tools/docs/generate_models.py qwen3     prints the rows of some families
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import trio
from model_families import DRAFTS, EXPERTS, FAMILIES, LATENT, LINEAR, MAMBA, NOT_OPENED, OTHERS, OWN, REFUSED, SIZES
from torch.overrides import TorchFunctionMode

from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.native import NativeModel
from rollouts.errors import RolloutsError
from rollouts.models.prepare import prepare_attention
from rollouts.types import Completion, LossOutput, Sample, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families begin -->", "<!-- families end -->"
ROUNDED_BEGIN, ROUNDED_END = "<!-- rounding begin -->", "<!-- rounding end -->"
REFUSED_BEGIN, REFUSED_END = "<!-- refused begin -->", "<!-- refused end -->"
WINDOW = 8
LOG_PROB_BAR, GRADIENT_BAR = 1e-5, 1e-4  # largest differences in float32: nats; relative to the largest entry of a gradient


@dataclass(frozen=True)
class Rounding:
    """How far the log-probs of an engine and of transformers' own pass, both in float32, are from those in float64; nats."""

    family: str
    engine: tuple[float, float]  # root of the mean square, and largest, over all sampled tokens
    own: tuple[float, float]

    def format(self) -> str:
        """Return the line of the table."""
        return f"| {self.family} | {' | '.join(f'{value:.1e}' for value in (*self.engine, *self.own))} |"


class Float64(TorchFunctionMode):
    """Computes in float64 what a model with weights in float64 asks to be computed in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*wide, **{name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()})


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    family: str
    training: str = ""  # way through attention
    decoding: str = ""
    log_probs: float = 0.0  # largest difference of the trainer's log-probs to transformers', nats
    gradients: float = 0.0  # largest difference of a gradient, relative to the largest entry of that parameter's
    engine: float = 0.0  # largest difference of the engine's log-probs to transformers', nats
    problem: str = ""  # why the family is refused or cannot be built

    def format(self) -> str:
        """Return the line."""
        if self.problem:
            return f"| {self.family} | {self.problem} | | | | |"
        pairs = ((self.log_probs, LOG_PROB_BAR), (self.gradients, GRADIENT_BAR), (self.engine, LOG_PROB_BAR))
        figures = " | ".join(f"{value:.0e}" if value <= bar else f"**{value:.0e}**" for value, bar in pairs)
        return f"| {self.family} | {self.training} | {self.decoding} | {figures} |"


def create_model(family: str, window: int = WINDOW, seed: int = 0) -> Any:
    """Create a tiny random causal language model. Raises ValueError if transformers has none of this family of these sizes.

    Args:
        window: sliding window, or size of chunks, of the layers that have one, in tokens.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if family not in CONFIG_MAPPING:
        raise ValueError("not in this version of transformers")
    kind = CONFIG_MAPPING[family]
    problem, model = None, cast("Any", None)
    for left_out in ((), ("head_dim",), tuple(LATENT)):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(kind(**choose_settings(family, window, left_out))).float().eval()
                for name, parameter in model.named_parameters():
                    if "proj" in name or "attn" in name:  # so that attention is not next to uniform
                        parameter.data *= 3
            with torch.no_grad():
                model(input_ids=torch.tensor([draw_rows(window)[0]]), use_cache=False)
            return model
        except Exception as error:  # whatever a configuration raises
            problem = error
    if family in REFUSED and model is not None:  # its own pass wants more than tokens
        return model
    print(f"{family}: {type(problem).__name__}: {problem}", file=sys.stderr)
    raise ValueError("not compared: no tiny configuration was found")


def choose_settings(family: str, window: int, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Choose the settings of a tiny configuration, also of the language model in it if that is another family.

    Args:
        window: as in create_model.
        left_out: names of settings that keep their defaults.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    names = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", ())}
    wanted = {**SIZES, **EXPERTS, **LATENT, **MAMBA, **LINEAR, **OTHERS, "sliding_window": window, "attention_chunk_size": window}
    wanted["max_position_embeddings"] = max(64, 8 * window)
    chosen = {name: value for name, value in wanted.items() if name in names and name not in left_out} | OWN.get(family, {})
    text = chosen.get("text_config")
    if isinstance(text, str):
        drafts = DRAFTS if family.endswith("assistant") else {}
        chosen["text_config"] = choose_settings(text, window, left_out) | drafts | {"model_type": text}
    return copy.deepcopy(chosen)


def read_log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return transformers' log-probs of one row [n] of tokens. # [n], 0 at the first"""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def find_worst(worst: float, differences: torch.Tensor) -> float:
    """Return the larger one of a number and the largest difference; infinity if one is no number."""
    found = float(differences.abs().max())
    return max(worst, found) if math.isfinite(found) else math.inf


def draw_rows(window: int) -> list[list[int]]:
    """Draw ragged rows of random tokens, two of them longer than four windows."""
    generator = torch.Generator().manual_seed(0)
    lengths = (4 * window + 1, 5, 4 * window + 1, 3 * window, window + 3)
    return [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def compare_training(model: Any, trained: Any, rows: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the largest differences of log-probs and gradients between a backend and the model's own passes over single rows.

    Args:
        model, trained: equal models.
    """
    samples = []
    for i, tokens in enumerate(rows):
        samples.append(Sample(index=i, group_index=i, tokens=tuple(tokens), loss_mask=(0, *[1] * (len(tokens) - 1)), reward=0.0))
    batch = replace(collate_samples(samples), dropout=False)
    weights = torch.linspace(-1, 1, batch.tokens.shape[1])
    backend = create_pytorch_backend(trained, lr=1e-3)
    found = backend.forward(batch, lambda outputs: outputs.log_probs).value
    backend.forward_backward(batch, lambda outputs, batch: LossOutput((outputs.log_probs * weights).sum(), {}))
    worst = 0.0
    for i, length in enumerate(batch.lengths.tolist()):
        row = read_log_probs(model, batch.tokens[i, :length])
        (row * weights[:length]).sum().backward()
        worst = find_worst(worst, row.detach() - found[i, :length])
    pairs = zip(backend.model.parameters(), model.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in pairs if b.grad is not None]
    largest, relative = max(float(b.abs().max()) for _, b in gradients), 0.0
    for a, b in gradients:
        relative = math.inf if a is None else find_worst(relative, (a - b) / (b.abs().max() + 1e-3 * largest))
    model.zero_grad()
    return worst, relative


async def sample_rows(served: Any, rows: Sequence[Sequence[int]]) -> tuple[str, list[Completion]]:
    """Return how the embedded engine decodes, by its name in the table, and completions of the beginnings of rows."""
    engine = InProcessEngine(served, eos_token_ids=())
    done: list[Completion] = []
    longest = max(map(len, rows)) // 3

    async def generate(i: int) -> None:
        params = SamplingParams(max_tokens=longest + 3 * i, seed=i)
        done.append(await engine.generate(rows[i][:longest], params, request_id=f"{i}"))

    async with engine, trio.open_nursery() as nursery:
        for i in range(len(rows)):
            nursery.start_soon(generate, i)
    slots = engine._slots  # pyright: ignore[reportPrivateUsage]
    if not isinstance(slots, NativeModel):
        return "slots", done
    return "native caches" if slots.uses_cache else "no caches", done


async def compare_engine(model: Any, served: Any, rows: Sequence[Sequence[int]]) -> tuple[str, float]:
    """Return how the embedded engine decodes, by its name in the table, and the largest difference of its log-probs.

    Args:
        model, served: equal models.
    """
    decoding, done = await sample_rows(served, rows)
    worst = 0.0
    for completion in done:
        tokens = torch.tensor([*completion.input_tokens, *completion.output_tokens])
        with torch.no_grad():
            expected = read_log_probs(model, tokens)[len(completion.input_tokens) :]
        worst = find_worst(worst, torch.tensor(completion.output_log_probs) - expected)
    return decoding, worst


def measure_rounding(family: str, window: int = WINDOW) -> Rounding:
    """Compare engine and transformers' own pass with float64, over the sampled tokens of three random models."""
    engine: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    for seed in range(3):
        model = create_model(family, window, seed=seed)
        exact = copy.deepcopy(model).double()
        for completion in trio.run(sample_rows, copy.deepcopy(model), draw_rows(window))[1]:
            tokens = torch.tensor([*completion.input_tokens, *completion.output_tokens])
            with torch.no_grad():
                rounded = read_log_probs(model, tokens)[len(completion.input_tokens) :].double()
                with Float64():
                    expected = read_log_probs(exact, tokens)[len(completion.input_tokens) :]
            assert expected.dtype == torch.float64, f"{family} gives {expected.dtype} for weights in float64"
            own.append(rounded - expected)
            engine.append(torch.tensor(completion.output_log_probs, dtype=torch.float64) - expected)
    found = [torch.cat(parts) for parts in (engine, own)]
    first, second = ((float(x.square().mean().sqrt()), float(x.abs().max())) for x in found)
    return Rounding(family, first, second)


def list_same_classes() -> dict[str, str]:
    """Return names that transformers registers for a class of another family of the table, and that family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as REGISTERED

    names = cast("dict[str, str]", dict(REGISTERED))
    classes = {names[family]: family for family in reversed(FAMILIES) if family in names}
    known = {*FAMILIES, *REFUSED, *NOT_OPENED}
    return {name: classes[kind] for name, kind in names.items() if name not in known and kind in classes}


def format_refused() -> list[str]:
    """Return the lines of the table of families that are refused or not compared, and the sentence about names of the same class."""
    lines = [f"| {family} | {reason} |" for family, reason in {**REFUSED, **NOT_OPENED}.items()]
    same = ", ".join(f"{name} ({family})" for name, family in list_same_classes().items())
    return [*lines, "", f"These names have the class of another row, which is given in brackets: {same}."]


def compare_family(family: str, window: int = WINDOW) -> Row:
    """Compare one family, in rows beyond four windows."""
    create, rows = partial(create_model, family, window), draw_rows(window)
    try:
        model = create()
    except ValueError as error:
        return Row(family, problem=str(error).splitlines()[0])
    try:
        training = "native rows" if prepare_attention(create()) else "packed"
        log_probs, gradients = compare_training(model, create(), rows)
        decoding, engine = trio.run(compare_engine, model, create(), rows)
    except RolloutsError as error:
        return Row(family, problem=f"refused: {str(error).splitlines()[0][:160]}")
    return Row(family, training, decoding, log_probs, gradients, engine)


def iterate_rows(families: Sequence[str]) -> Iterator[Row]:
    """Compare families one after another, quietly."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for family in families:
        yield compare_family(family)


def main(families: Sequence[str]) -> None:
    """Write the table, or print rows."""
    lines = []
    for row in iterate_rows(families or FAMILIES):
        lines.append(row.format())
        print(lines[-1], flush=True)
    if not families:
        replace_block(BEGIN, lines, END)
        rounded = [line.split(" | ")[0].strip("| ") for line in lines if "**" in line]
        replace_block(ROUNDED_BEGIN, [measure_rounding(family).format() for family in rounded], ROUNDED_END)
        replace_block(REFUSED_BEGIN, format_refused(), REFUSED_END)


def replace_block(begin: str, lines: Sequence[str], end: str) -> None:
    """Write lines between two marks of the page."""
    text = PAGE.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text("\n".join([before + begin, *lines, end + after]))


if __name__ == "__main__":
    main(sys.argv[1:])
