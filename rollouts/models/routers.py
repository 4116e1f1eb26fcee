"""Routers of a mixture-of-experts model: found, recorded and checked.

transformers names the module class that returns router logits in a model's `_can_record_outputs`. A small run at construction says which
of these modules a pass calls, and in which order, and whether they return the chosen experts beside the logits: (logits [N, E], ...,
experts [N, k], ...). The same run compares the load-balancing loss with the model's own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.models.expert_load import balance_loss
from rollouts.types import ExpertLoad

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_logger = logging.getLogger(__name__)

NoteChoice: TypeAlias = Callable[[int, Tensor, Tensor], None]
"""f(place of the router, logits [N, E], experts [N, k])."""


@dataclass(frozen=True, eq=False)
class Routers:
    """Routers of a model, in the order in which a pass calls them; none if they cannot be recorded."""

    modules: tuple[torch.nn.Module, ...] = ()
    parents: tuple[torch.nn.Module, ...] = ()  # module that each is a part of
    layers: tuple[int, ...] = ()  # decoder layer of each
    num_layers: int = 0  # decoder layers, those without a router included
    logits_index: int = 0  # place of the logits in a router's outputs
    num_experts: int = 0  # E, of each router
    top_k: int = 0  # experts of a token
    problem: str | None = None  # reason why they cannot be recorded; None = they can
    balance_problem: str | None = None  # reason why the model has no load-balancing loss; None = it has one
    replay_problem: str | None = None  # reason why its experts cannot be chosen from outside; None = they can

    def check_balance(self) -> None:
        """Raise ConfigError unless the load-balancing loss can be computed."""
        problem = self.problem or self.balance_problem
        if problem is not None:
            raise ConfigError(f"router_balance_coef is set, but {problem}: set it to 0")

    def check_replay(self) -> None:
        """Raise ConfigError unless recorded experts can be replayed."""
        problem = self.problem or self.replay_problem
        if problem is not None:
            raise ConfigError(f"RLTrainingConfig.router_replay is set, but {problem}: set it to False")


@contextmanager
def record_choices(routers: Routers, note: NoteChoice) -> Generator[None]:
    """Call note for each call of a router in the block. A pass that recomputes activations after the block is not noted again."""

    def hook(_module: torch.nn.Module, _inputs: Any, outputs: Any, *, place: int) -> None:
        logits, experts = read_outputs(outputs, routers.logits_index)
        note(place, logits, experts)

    with ExitStack() as stack:
        for place, module in enumerate(routers.modules):
            stack.callback(module.register_forward_hook(partial(hook, place=place)).remove)
        yield


class LoadRecord:
    """Sums of what the routers did in a pass."""

    def __init__(self, routers: Routers, *, with_gradient: bool) -> None:
        self._routers, self._with_gradient = routers, with_gradient
        self._sums: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._logits: list[tuple[int, Tensor, Tensor]] = []
        self._num_tokens = 0

    def note(self, place: int, logits: Tensor, experts: Tensor) -> None:
        """Add a call of a router, see NoteChoice."""
        if place == 0:
            self._num_tokens += logits.shape[0]
        if self._with_gradient:  # not computed here: a layer that is recomputed would miss what autograd saves of it
            self._logits.append((place, logits, experts))
        else:
            with torch.no_grad():
                self._add(place, logits, experts)

    def sum_up(self) -> ExpertLoad:
        """Return the sums over all calls."""
        while self._logits:
            self._add(*self._logits.pop(0))
        counts, probs, entropy = (torch.stack(column) for column in zip(*(self._sums[i] for i in sorted(self._sums)), strict=True))
        return ExpertLoad(
            counts=counts, probs=probs, entropy=entropy, num_tokens=torch.tensor(float(self._num_tokens), device=counts.device)
        )

    def _add(self, place: int, logits: Tensor, experts: Tensor) -> None:
        with torch.autocast(logits.device.type, enabled=False):
            log_probs = logits.float().log_softmax(-1)
            probs = log_probs.exp()
            entropy = -(probs * log_probs).detach().sum()
            chosen = torch.zeros_like(probs).scatter(1, experts, 1.0)
        found = chosen.sum(0), probs.sum(0), entropy
        before = self._sums.get(place)
        self._sums[place] = found if before is None else (before[0] + found[0], before[1] + found[1], before[2] + found[2])


def find_routers(model: PreTrainedModel, run: Callable[[], object], run_own: Callable[[], Any]) -> Routers:
    """Find the routers of a model in eval mode by a pass, and compare the load-balancing loss with the model's own.

    Args:
        run: runs the decoder on a few tokens.
        run_own: runs the model's own forward pass with output_router_logits=True and returns its outputs.
    """
    routers = probe_routers(model, run)
    if routers.problem is None:
        return replace(routers, balance_problem=_compare_balance(type(model).__name__, routers, run_own))
    if _find_recorders(model):
        _logger.info("the load of experts is not measured: %s", routers.problem)
    return routers


def probe_routers(model: PreTrainedModel, run: Callable[[], object]) -> Routers:
    """Find the routers of a model in eval mode by a pass. Arguments as find_routers."""
    kind = type(model).__name__
    recorders = _find_recorders(model)
    if not recorders:
        return Routers(problem=f"{kind} is no mixture of experts, or one whose routers transformers does not record")
    if len(recorders) > 1:
        return Routers(problem=f"{kind} has routers of several kinds ({', '.join(r.target_class.__name__ for r in recorders)})")
    recorder = recorders[0]
    calls: list[tuple[torch.nn.Module, Any]] = []

    def note(router: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        calls.append((router, outputs))

    with ExitStack() as stack:
        for name, module in cast("torch.nn.Module", model).named_modules():
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                stack.callback(module.register_forward_hook(note).remove)
        run()
    modules = tuple(module for module, _ in calls)
    if not modules:
        return Routers(problem=f"{kind} has no router in this configuration")
    if len(set(modules)) < len(modules):
        return Routers(problem=f"{kind} calls a router several times in a pass")
    try:
        found = [read_outputs(outputs, recorder.index) for _, outputs in calls]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        return Routers(problem=f"{kind} has routers of another kind than those known here: {type(modules[0]).__name__} {error}")
    sizes = {(logits.shape[-1], experts.shape[-1]) for logits, experts in found}
    if len(sizes) > 1:
        return Routers(problem=f"{kind} has routers of several sizes, (experts, experts of a token) being {sorted(sizes)}")
    num_experts, top_k = sizes.pop()
    names = {module: name for name, module in cast("torch.nn.Module", model).named_modules()}
    parents = tuple(cast("torch.nn.Module", model).get_submodule(names[module].rpartition(".")[0]) for module in modules)
    return Routers(
        modules=modules,
        parents=parents,
        layers=_find_layers(names[module] for module in modules),
        num_layers=int(model.config.get_text_config().num_hidden_layers),  # pyright: ignore[reportAttributeAccessIssue]
        logits_index=recorder.index,
        num_experts=num_experts,
        top_k=top_k,
    )


def _find_layers(names: Iterable[str]) -> tuple[int, ...]:
    """Return the number in the name of each module, as in model.layers.3.mlp.gate; () unless each has one of its own."""
    found = [re.findall(r"\.(\d+)\.", name) for name in names]
    layers = tuple(int(numbers[0]) for numbers in found if numbers)
    return layers if len(set(layers)) == len(found) else ()


def _find_recorders(model: PreTrainedModel) -> list[Any]:
    """Return transformers' records of the modules that return router logits, which have target_class, index and layer_name."""
    named = cast("Mapping[str, Any]", getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    found = cast("list[Any]", named) if isinstance(named, list) else [] if named is None else [named]
    return [recorder for recorder in found if hasattr(recorder, "target_class")]


def read_outputs(outputs: Any, logits_index: int) -> tuple[Tensor, Tensor]:
    """Return logits [N, E] and chosen experts [N, k] of a router's outputs. Raises ValueError for other outputs."""
    if not isinstance(outputs, tuple):
        raise ValueError("returns one value instead of logits and experts")
    values = cast("tuple[Any, ...]", outputs)
    logits = values[logits_index]
    whole = [x for x in values if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool]
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or len(whole) != 1:
        raise ValueError("does not return logits, and experts beside them")
    logits = logits.reshape(-1, logits.shape[-1])
    experts = whole[0].reshape(-1, whole[0].shape[-1])
    if len(experts) != len(logits) or experts.shape[-1] > logits.shape[-1]:
        raise ValueError(f"returns logits {list(logits.shape)} and experts {list(experts.shape)}")
    return logits, experts


def _compare_balance(kind: str, routers: Routers, run_own: Callable[[], Any]) -> str | None:
    """Compare the load-balancing loss with the model's own. Returns the reason why it cannot be used; None if the two are the same."""
    record = LoadRecord(routers, with_gradient=False)
    try:
        with record_choices(routers, record.note):
            own = getattr(run_own(), "aux_loss", None)
    except (TypeError, AssertionError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        return f"{kind} does not compute its own load-balancing loss, which would be compared: {error}"
    if not isinstance(own, Tensor):
        return f"{kind} has no load-balancing loss in transformers"
    load = record.sum_up()
    found = float(balance_loss(load, load))
    rounded = own.dtype != torch.float32 or torch.is_autocast_enabled(own.device.type)  # two experts may then have the same probability
    if not abs(found - float(own)) <= (5e-2 if rounded else 1e-3) * abs(float(own)):
        return f"{kind} computes another load-balancing loss ({float(own):.4g}) than transformers' usual one ({found:.4g})"
    return None
