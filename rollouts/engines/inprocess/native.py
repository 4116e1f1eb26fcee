"""Decoding with a model's own attention and caches, for models that slots of keys and values cannot compute.

Running sequences of one length that began together, as the samples of a prompt do, form a cohort with one cache and are decoded by one
forward pass; a batch of different lengths would need pads, which recurrent layers read. A cohort never grows: its rows leave one by one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollouts.engines.inprocess.experts import ExpertRecorder
from rollouts.engines.inprocess.slots import Decoding, SlotModel
from rollouts.errors import ConfigError
from rollouts.models.forward.attention import USE_ANOTHER
from rollouts.models.forward.output_layers import find_cache_name, get_decoder, get_output_layer
from rollouts.models.loading import mend_own_code
from rollouts.models.prepare import (
    check_output_layer,
    check_same,
    draw_check_tokens,
    find_check_length,
    find_widest,
    open_choices,
    restore_attention,
    warn_of_ties,
    widened,
)
from rollouts.models.replay import Choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class NativePrefix:
    """A prefilled prompt."""

    cache: Any  # transformers' cache of one row; None for a model without caches
    tokens: Tensor  # [1, n] int64
    logits: Tensor  # [V] float32, for the token after it
    experts: Tensor | None = None  # [n, routers, k] int16; None = not recorded

    @property
    def length(self) -> int:
        """Number of tokens n."""
        return self.tokens.shape[1]


@dataclass(eq=False)
class _Cohort:
    """Sequences of one length with one cache."""

    cache: Any  # as in NativePrefix, of all rows
    tokens: Tensor  # [S, n] int64
    hidden: Tensor | None = None  # [S, H] last hidden states of the newest step
    experts: Tensor | None = None  # [S, routers, k] int16 experts of the newest step; None = not recorded
    is_whole: bool = True  # False = a step failed in the middle, so that some layers of the cache have its tokens

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows and put these in this order."""
        if list(rows) == list(range(self.tokens.shape[0])):
            return
        index = torch.tensor(rows, device=self.tokens.device)
        self.tokens = self.tokens[index]
        self.hidden = None if self.hidden is None else self.hidden[index]
        self.experts = None if self.experts is None else self.experts[index]
        if self.cache is not None:
            self.cache.reorder_cache(index)


class NativeModel:
    """A model with cohorts, used like a SlotModel. Holds weights and caches; independent of requests."""

    def __init__(self, model: PreTrainedModel, *, name: str) -> None:
        """
        Args:
            model: used by this object alone from now on.

        Raises: ConfigError if decoding with caches gives other logits than the model's own forward pass.
        """
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self._name = name
        self._decoder: Any = get_decoder(model)
        self._cache_name = find_cache_name(self._decoder)
        self._head = get_output_layer(model)
        self.places: list[tuple[_Cohort, int]] = []  # cohort and row of each slot
        self.uses_cache = True  # False = the whole sequence is computed for each token
        self.recorder = ExpertRecorder()
        self.experts: Tensor | None = None
        try:
            self._check_rounded()
        except ConfigError as problem:
            self.uses_cache = False
            self._check_rounded()
            _logger.warning(
                "%s computes the whole sequence for each token, since its caches cannot be used: %s", type(model).__name__, problem
            )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[NativePrefix]:
        """Run prompts one by one."""
        return [self._prefill(prompt) for prompt in prompts]

    def forget(self) -> None:
        """Do nothing: recurrent states cannot be cut to a beginning, so nothing is kept for later prompts."""

    def _prefill(self, prompt: Sequence[int]) -> NativePrefix:
        tokens = torch.tensor([list(prompt)], device=self.device)
        with torch.inference_mode():
            output, experts = self.recorder.run(lambda: self._decoder(input_ids=tokens, use_cache=self.uses_cache))
            cache = getattr(output, self._cache_name, None) if self.uses_cache else None
            return NativePrefix(cache, tokens, self.compute_logits(output.last_hidden_state[0, -1]), experts)

    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """Return the last hidden states of one row. # [N, H]"""
        with torch.inference_mode():
            return self._decoder(input_ids=torch.tensor([list(tokens)], device=self.device), use_cache=False).last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] in float32 from hidden states [..., H]."""
        with torch.inference_mode():
            return self._head.compute_logits(hidden).float()

    def fill(self, slots: Sequence[int], prefix: NativePrefix) -> None:
        """Begin a cohort of as many sequences as slots, each from the prefix."""
        with torch.inference_mode():
            cohort = _Cohort(copy.deepcopy(prefix.cache), prefix.tokens)
            cohort.keep([0] * len(slots))
        self.places += [(cohort, -1)] * (max(slots) + 1 - len(self.places))  # filled in before it is decoded
        for row, slot in enumerate(slots):
            self.places[slot] = (cohort, row)

    def decode(self, tokens: Tensor, positions: Sequence[int]) -> Tensor:
        """Append one token to each of the first A slots and return the logits after it. Arguments and result as in SlotModel.decode."""
        del self.places[tokens.numel() :]
        cohorts: dict[int, tuple[_Cohort, list[int]]] = {}  # cohort and its slots, in order
        for slot, (cohort, _) in enumerate(self.places):
            cohorts.setdefault(id(cohort), (cohort, []))[1].append(slot)
        hidden: list[Tensor] = []
        experts: list[Tensor] = []
        order: list[int] = []
        with torch.inference_mode():
            for cohort, slots in cohorts.values():
                cohort.keep([self.places[slot][1] for slot in slots])
                for row, slot in enumerate(slots):
                    self.places[slot] = (cohort, row)
                hidden.append(self._step(cohort, tokens[slots], positions[slots[0]]))
                experts += [] if cohort.experts is None else [cohort.experts]
                order += slots
            logits = self.compute_logits(torch.cat(hidden))
            places = torch.tensor(order, device=self.device).argsort()
            self.experts = torch.cat(experts)[places] if experts else None
            return logits[places]

    def move(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Give slots the sequences of other slots (distinct from all targets)."""
        for source, target in zip(sources, targets, strict=True):
            self.places[target] = self.places[source]

    def free(self, num_used: int) -> None:
        """Give back the slots from num_used on; a cohort without slots gives back its memory."""
        del self.places[num_used:]

    def _step(self, cohort: _Cohort, tokens: Tensor, position: int) -> Tensor:
        """Append a token to each row of a cohort, once, however often the step is repeated. Returns the last hidden states. # [S, H]

        Args:
            position: that of the token, the same in each row.
        """
        if cohort.hidden is not None and cohort.tokens.shape[1] == position + 1:  # an error came behind this step
            return cohort.hidden
        if self.uses_cache and not cohort.is_whole:
            cohort.cache = getattr(self._decoder(input_ids=cohort.tokens, use_cache=True), self._cache_name)
        cohort.is_whole = False
        longer = torch.cat([cohort.tokens, tokens[:, None]], dim=1)
        call: dict[str, Any] = {"input_ids": longer, "use_cache": False}
        if cohort.cache is not None:
            positions = torch.full_like(tokens[:, None], position)
            call = {"input_ids": tokens[:, None], "position_ids": positions, self._cache_name: cohort.cache, "use_cache": True}
        output, experts = self.recorder.run(lambda: self._decoder(**call))
        hidden = output.last_hidden_state[:, -1]
        cohort.experts = None if experts is None else experts.unflatten(0, (len(tokens), -1))[:, -1]
        cohort.tokens, cohort.hidden, cohort.is_whole = longer, hidden, True
        return hidden

    def _check_rounded(self) -> None:
        """Run _check; where rounding in half precision alone is beyond the limit, as Gemma 3n's may be, compare in float32."""
        try:
            self._check()
        except ConfigError:
            if next(self.model.parameters()).dtype == torch.float32:
                raise
            with widened(self.model):
                self._check()

    def _check(self) -> None:
        """Compare decoding with the model's own forward pass without a cache, in rows longer than its windows, one of which ends early."""
        self.places.clear()
        kind = type(self.model).__name__
        try:
            with torch.inference_mode():
                length = find_check_length(self.model, find_widest(self.model), at_least=9)
                rows = draw_check_tokens(self.model, (4, length))
                rows[1:, : length - 3] = rows[1, : length - 3]  # all but the first begin together
                with open_choices(self.model) as choices:
                    found, wanted = self._compare(rows, choices)
                    dtype = self._head.weight.dtype
        except ConfigError as error:
            raise ConfigError(f"{self._name}: {error}") from error
        except (TypeError, RuntimeError, AssertionError, AttributeError, LookupError, ValueError) as error:
            raise ConfigError(f"{self._name}: {kind} cannot decode: {error}") from error
        what = f"{self._name}: {kind} gives other logits when it decodes than in one pass"
        check_same(torch.stack(found), torch.stack(wanted), what, dtype)
        self.places.clear()

    def _compare(self, rows: Tensor, choices: Choices) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits of the last tokens of rows # [4, n], decoded and in the model's own pass.

        Two cohorts are decoded, the second of three rows, of which one ends early. They differ in size, by which choices tells them apart.
        """
        begun = rows.shape[1] - 3
        numbers = torch.arange(rows.numel()).view(rows.shape)  # numbers of the tokens in choices
        check_output_layer(self.model)
        with choices.record():
            expected = self.model(input_ids=rows, use_cache=False).logits.float()
        prefixes: list[NativePrefix] = []
        for i in (0, 1):
            with choices.replay({(1, begun): numbers[i, :begun]}):
                prefixes += self.prefill([rows[i, :begun].tolist()])
        self.fill([0], prefixes[0])
        self.fill([1, 2, 3], prefixes[1])
        found, wanted, alive = [prefixes[0].logits], [expected[0, begun - 1]], [0, 1, 2, 3]
        for place in (begun, begun + 1, begun + 2):
            if place == begun + 1:
                self.move([3], [1], place)  # the second row ends
                alive = [0, 3, 2]
            first = place if self.uses_cache else 0
            parts = [numbers[cohort, first : place + 1] for cohort in (alive[:1], alive[1:])]
            with choices.replay({(len(part), part.shape[1]): part.flatten() for part in parts}):
                found += self.decode(rows[alive, place], [place] * len(alive))
            wanted += expected[alive, place]
        return found, wanted


def open_slots(model: PreTrainedModel, *, max_slots: int, name: str, kept_tokens: int = 0, cuda_graphs: bool = False) -> Decoding:
    """Create the fastest kind of decoding that computes a model right.

    Args:
        model, max_slots, kept_tokens, cuda_graphs: as for SlotModel. Other kinds of decoding have no graphs.

    Raises: ConfigError if no kind gives the logits of the model's own forward pass.
    """
    mend_own_code(model)
    before = cast("str | None", getattr(model.config, "_attn_implementation", None))
    try:
        decoding = SlotModel(model, max_slots=max_slots, name=name, kept_tokens=kept_tokens, cuda_graphs=cuda_graphs)
        _check_dtype(decoding, model, name)
        return decoding
    except ConfigError as refusal:
        restore_attention(model, before)
        native = NativeModel(model, name=name)
        why = str(refusal).removesuffix(f" {USE_ANOTHER}").removesuffix(".")
    _logger.warning("%s decodes with its own attention and caches, which is slower than slots: %s", type(model).__name__, why)
    warn_of_ties(model)
    _check_dtype(native, model, name)
    return native


def _check_dtype(decoding: Decoding, model: PreTrainedModel, name: str) -> None:
    """Raise ConfigError if a model cannot compute with weights of its dtype, as where its code mixes float32 with half precision.

    The comparison of a mixture of experts with its own pass may have been in float32, see open_choices.
    """
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        return
    length = find_check_length(model, find_widest(model), at_least=9)
    try:
        decoding.hidden_states(draw_check_tokens(model, (1, length))[0].tolist())
    except (TypeError, RuntimeError, AssertionError, AttributeError, LookupError, ValueError) as error:
        raise ConfigError(
            f"{name}: {type(model).__name__} cannot compute with all weights in {str(dtype).removeprefix('torch.')} ({error}): open its "
            "directory in that dtype, which leaves weights that it wants in float32 as they are, or take --engine.dtype float32"
        ) from error
