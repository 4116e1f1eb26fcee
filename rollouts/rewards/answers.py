"""Rewards that compare answers, and how a reward function is found by name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rollouts.errors import ConfigError, RewardError, locate_error
from rollouts.types import Sample, Status

# a minus is a sign only where no number or word stands before it: "9-4" ends with 4
_NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\$\s?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)\]])-)?\$?\.\d+", re.ASCII)


def ground_truth(sample: Sample) -> Any:
    """metadata["ground_truth"] of a sample. Raises RewardError if there is none."""
    if "ground_truth" not in sample.metadata:
        raise RewardError(
            f"sample {sample.index} has no metadata['ground_truth'] (keys: {sorted(sample.metadata)}): "
            "give each prompt an answer, or use a reward that needs none"
        )
    return sample.metadata["ground_truth"]


def exact_match(sample: Sample) -> float:
    """1 if the response, without white space at its ends, is the ground truth and ended by itself; else 0.

    A response that was cut off does not count, even if what is there is right: the model has not learned where to end.
    """
    right = sample.response.strip() == str(ground_truth(sample)).strip()
    return float(right and sample.status is Status.COMPLETED)


def normalize_number(text: str) -> str | None:
    """A number as written by people in one form: "$1,234.50" -> "1234.5", "-7." -> "-7"; None if it is not a number."""
    cleaned = text.replace("\N{MINUS SIGN}", "-").replace(",", "").replace("$", "").strip().rstrip(".").rstrip("%")
    cleaned = re.sub(r"\s", "", cleaned)
    if not re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)", cleaned, re.ASCII):
        return None
    sign = "-" if cleaned.startswith("-") else ""
    whole, _, fraction = cleaned.lstrip("+-").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    if whole == "0" and not fraction:
        sign = ""
    return sign + whole + (f".{fraction}" if fraction else "")


def extract_gsm8k_answer(text: str, *, strict: bool = False) -> str | None:
    """The final answer of a GSM8K solution, normalised.

    The first number behind the last "####"; without such a mark, unless strict, the last number in the text.

    Returns: for example "1234.5", or None if there is no number.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    marked = text.rpartition("####")
    if marked[1]:
        found = _NUMBER.search(marked[2])
        return None if found is None else normalize_number(found.group())
    if strict:
        return None
    numbers = _NUMBER.findall(text)
    return normalize_number(numbers[-1]) if numbers else None


def gsm8k_reward(sample: Sample) -> float:
    """1 if the final answer of the response equals that of the ground truth (a number, or a whole GSM8K solution); else 0.

    Source: Cobbe et al. 2021, with the last number as fallback as in common evaluation harnesses.
    """
    truth = extract_gsm8k_answer(str(ground_truth(sample)))
    if truth is None:
        raise RewardError(f"the ground truth of sample {sample.index} has no number: {ground_truth(sample)!r}")
    return float(extract_gsm8k_answer(sample.response) == truth)


def adapt_completion_reward(reward_fn: Callable[..., Any], decode: Callable[[Sequence[int]], str]) -> Callable[[Sample], Any]:
    """A reward of the signature (prompt, completions, prompt_ids, completion_ids, **data) as a function of a Sample.

    Args:
        reward_fn: gets the texts and token ids of prompt and completion, and the sample's metadata as keywords.
        decode: token ids -> text, for example tokenizer.decode.
    """

    def reward(sample: Sample) -> Any:
        start = next((t for t, mask in enumerate(sample.loss_mask) if mask > 0), len(sample.tokens))
        prompt_ids, completion_ids = list(sample.tokens[:start]), list(sample.tokens[start:])
        return reward_fn(decode(prompt_ids), sample.response, prompt_ids, completion_ids, **sample.metadata)

    return reward


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a new module. Raises ConfigError if it is not there or cannot be imported."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    # a name of its own, under which dataclasses and pickle can find the module
    name = f"{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} has no import loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's: whatever is wrong in it, say where it comes from
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error} ({locate_error(error)})") from error
    return module


def load_function(reference: str) -> Callable[..., Any]:
    """The function named by "package.module:name" or "path/to/file.py:name".

    The module is imported, so its code runs: name only code you trust.

    Raises: ConfigError saying which part was not found.
    """
    location, separator, name = reference.rpartition(":")
    if not separator or not location or not name:
        raise ConfigError(f"{reference!r} does not name a function: write 'package.module:name' or 'path/to/file.py:name'")
    if location.endswith(".py"):
        module = load_module(Path(location))
    else:
        try:
            module = importlib.import_module(location)
        except (ImportError, TypeError, ValueError) as error:  # relative and empty names are the latter two
            raise ConfigError(f"cannot import {location!r} (from {reference!r}): {error}") from error
        except Exception as error:  # see load_module
            what = f"{type(error).__name__}: {error} ({locate_error(error)})"
            raise ConfigError(f"cannot import {location!r} (from {reference!r}): {what}") from error
    function = getattr(module, name, None)
    if not callable(function):
        available = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        close = difflib.get_close_matches(name, available, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(available) or 'none'}"
        raise ConfigError(f"{location} has no function {name!r}: {hint}")
    return function
