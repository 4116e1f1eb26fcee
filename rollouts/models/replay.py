"""Replay of recorded experts: the routers of a pass choose those that an engine's routers chose for the same tokens.

A small difference of an engine's numbers makes a router choose another expert, and the log-probs of engine and trainer then differ by much
more than rounding. With rollout routing replay (R3, arXiv 2510.11370) the trainer's experts are the engine's, while the weights of the
experts stay the trainer's own, with their gradient: the model's code computes them from its scores at the given experts, because the call
of topk that chooses experts returns these places instead of the largest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollouts.errors import DataError
from rollouts.models.routers import Routers, read_outputs, record_choices

_TOPK: frozenset[Any] = frozenset({torch.topk, Tensor.topk})


class _ChooseExperts(TorchFunctionMode):
    """Give topk over all experts the result for given experts; -1 = the largest, as usual."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """Args: experts: # [N, k] int64."""
        super().__init__()
        self._experts, self._num_experts = experts, num_experts
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        scores, own = args[0], result.indices
        if tuple(scores.shape) != (len(self._experts), self._num_experts) or own.shape != self._experts.shape:
            return result  # a choice among groups of experts
        self.num_calls += 1
        chosen = torch.where(self._experts < 0, own, self._experts)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@contextmanager
def replay_experts(routers: Routers, experts: Mapping[tuple[int, int], Tensor]) -> Generator[None]:
    """Make the routers choose given experts in the block, also where a backward pass in it recomputes a layer.

    Args:
        experts: the experts of each call of the model by the shape (S, L) of its tokens: # [S * L, routers, k] int64; -1 = the router's own
            choice. {} = do nothing.
    """
    if not experts:
        yield
        return
    shapes: dict[int, tuple[int, int]] = {}  # tokens of the call that each router is in

    def note_shape(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, place: int) -> None:
        hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == 3)
        shapes[place] = (hidden.shape[0], hidden.shape[1])

    def choose(*args: Any, place: int, own: Callable[..., Any], **kwargs: Any) -> Any:
        with _ChooseExperts(experts[shapes[place]][:, place], routers.num_experts) as mode:
            outputs = own(*args, **kwargs)
        assert mode.num_calls == 1, f"router {place} chose its experts in {mode.num_calls} calls of topk, expected 1"
        return outputs

    with ExitStack() as stack:
        for place, (router, parent) in enumerate(zip(routers.modules, routers.parents, strict=True)):
            stack.callback(parent.register_forward_pre_hook(partial(note_shape, place=place), with_kwargs=True).remove)
            before = router.__dict__.get("forward")
            cast("Any", router).forward = partial(choose, place=place, own=router.forward)
            stack.callback(_restore_forward, router, before)
        yield


def _restore_forward(router: torch.nn.Module, before: Any) -> None:
    if before is None:
        del router.__dict__["forward"]
    else:
        cast("Any", router).forward = before


class Choices:
    """Experts that the routers choose in passes that are recorded, and their replay in passes over the same tokens, which are compared.

    In half precision two right computations of a token differ by rounding; where that changes an expert, the results differ by much more.
    """

    def __init__(self, routers: Routers) -> None:
        """Args: routers: without any, nothing is recorded or replayed."""
        self._routers = routers
        self._noted: tuple[list[Tensor], ...] = tuple([] for _ in routers.modules)  # for each router, [N, k] for each pass

    def record(self) -> AbstractContextManager[None]:
        """Record the passes of the block. Their tokens are numbered on."""
        return record_choices(self._routers, lambda place, _, experts: self._noted[place].append(experts))

    def replay(self, calls: Mapping[tuple[int, int], Tensor]) -> AbstractContextManager[None]:
        """Replay recorded experts in the passes of the block.

        Args:
            calls: by the shape (S, L) of a call's tokens: the number of the recorded token that each one is # [S * L]; -1 = the router's
                own choice.
        """
        if not self._noted:
            return nullcontext()
        experts = torch.stack([torch.cat(noted) for noted in self._noted], 1)  # [N, routers, k]
        known = torch.cat([experts, torch.full_like(experts[:1], -1)])
        return replay_experts(self._routers, {shape: known[numbers.to(known.device)] for shape, numbers in calls.items()})


def select_routers(routers: Routers, experts: Tensor) -> Tensor:
    """Return the part of a batch's record # [..., layers or routers, k] that is about routers # [..., routers, k].

    A server records one place for each decoder layer, also for those without a router.
    """
    num_routers = len(routers.modules)
    if experts.shape[-2] == num_routers or experts.shape[-2] != routers.num_layers or len(routers.layers) != num_routers:
        return experts
    return experts[..., list(routers.layers), :]


def check_replayed(routers: Routers, experts: Tensor) -> None:
    """Raise DataError unless a batch's record # [B, T, layers or routers, k] is of such routers."""
    experts = select_routers(routers, experts)
    found, expected = tuple(experts.shape[2:]), (len(routers.modules), routers.top_k)
    if found != expected:
        raise DataError(
            f"the samples have recorded experts of {found[0]} routers with {found[1]} experts of a token, but the model has {expected[0]} "
            f"with {expected[1]}: they were sampled with another model"
        )
    if int(experts.max()) >= routers.num_experts:
        raise DataError(f"the samples have the recorded expert {int(experts.max())}, but each router has {routers.num_experts} experts")


def compare_replay(kind: str, routers: Routers, run: Callable[[], Tensor], shape: tuple[int, int]) -> str | None:
    """Compare passes with replayed experts. Returns the reason why the model cannot replay them; None if it can.

    Args:
        run: runs the decoder on the same tokens and returns its hidden states.
        shape: of these tokens.
    """
    outputs: dict[int, tuple[Any, ...]] = {}

    def keep(_router: torch.nn.Module, _inputs: Any, found: Any, *, place: int) -> None:
        outputs[place] = found

    chosen: dict[int, Tensor] = {}
    try:
        with record_choices(routers, lambda place, _, experts: chosen.update({place: experts})):
            expected = run()
        own = torch.stack([chosen[i] for i in range(len(routers.modules))], 1)
        with replay_experts(routers, {shape: own}):
            same = run()
        other = (own + 1) % routers.num_experts
        with ExitStack() as stack:
            for place, router in enumerate(routers.modules):
                stack.callback(router.register_forward_hook(partial(keep, place=place)).remove)
            with replay_experts(routers, {shape: other}):
                run()
    except (TypeError, AssertionError, RuntimeError, ValueError, LookupError, AttributeError, StopIteration) as error:
        return f"{kind} has routers whose experts cannot be chosen from outside: {error}"
    if float((same - expected).abs().max()) > 1e-3 * float(expected.abs().max()):
        return f"{kind} gives other results when its routers are given the experts that they have chosen"
    for place, found in outputs.items():
        logits, experts = read_outputs(found, routers.logits_index)
        weights = [x for x in found if isinstance(x, Tensor) and x.is_floating_point() and x.numel() == experts.numel() != logits.numel()]
        if not torch.equal(experts, other[:, place]) or len(weights) != 1 or bool((weights[0] == 0).any()):
            return f"{kind} has routers that give experts a weight of 0 unless they would have chosen them, or their group, by themselves"
    return None
