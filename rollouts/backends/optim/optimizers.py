"""AdamW and its learning-rate schedule: arguments of all backend factories, the rule made of them, and torch's objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Required, TypedDict, TypeVar, Unpack, cast, get_origin, get_type_hints

import torch

from rollouts.backends.optim.schedules import Schedule, choose_factor, warmup_constant
from rollouts.backends.optim.updates import UpdateCounts
from rollouts.config import BadNumbers, Moments, OptimizerConfig
from rollouts.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class AdamWArguments(TypedDict, total=False):
    """Keyword arguments of factories: an optimizer. Defaults and ranges are those of config.OptimizerConfig."""

    lr: Required[float]  # learning rate; with a schedule its peak
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # weight decay, on matrices only
    max_grad_norm: float  # norm that larger gradients are scaled down to; inf = no clipping
    moments: Moments  # format of Adam's two moments: float32, or 8bit, see create_8bit_optimizer
    bad_numbers: BadNumbers  # policy for a loss, gradient or ratio that goes bad


class _ScheduleArguments(AdamWArguments, total=False):
    schedule: Schedule  # schedule after the warm-up
    warmup_steps: int  # optimizer steps until the peak
    min_lr_ratio: float  # learning rate at the end of the schedule, relative to the peak


class ScheduledAdamWArguments(_ScheduleArguments, total=False):
    """Keyword arguments of factories: an optimizer and a schedule, constant by default."""

    total_steps: int | None  # optimizer steps until the end of the schedule, warm-up included; required for linear and cosine


class EndingAdamWArguments(_ScheduleArguments, total=False):
    """Keyword arguments of factories: an optimizer and a schedule with a known end."""

    total_steps: Required[int]  # optimizer steps until the end of the schedule, warm-up included


@dataclass(frozen=True)
class AdamW:
    """AdamW with decay on matrices only, clipping by the global norm and a schedule: an update without its state."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # inf = no clipping
    schedule: Callable[[int], float] = field(default=lambda step: warmup_constant(step, warmup_steps=0))  # update number -> factor of lr
    moments: Moments = "float32"
    bad_numbers: BadNumbers = field(default_factory=BadNumbers)

    def rate(self, counts: UpdateCounts) -> float:
        """Return the learning rate of the next update."""
        return self.lr * self.schedule(counts.num_updates)

    def create_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Create the optimizer for the parameters of a model that require a gradient. Raises ConfigError, see create_8bit_optimizer."""
        create = create_adamw_optimizer if self.moments == "float32" else create_8bit_optimizer
        return create(model, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    def require_float32_moments(self, backend: str) -> None:
        """Raise ConfigError if the moments have 8 bits. backend: the backend that cannot have them, for the message."""
        if self.moments != "float32":
            raise ConfigError(
                f"moments is {self.moments!r}, but {backend} keeps Adam's moments in float32: take moments='float32', or the backend of "
                "one process (create_pytorch_backend; --backend.kind pytorch)"
            )

    def create_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Create torch's schedule for that optimizer."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)


def create_rule(**arguments: Unpack[ScheduledAdamWArguments]) -> AdamW:
    """Create the rule from the arguments of a factory.

    Raises: ConfigError for a value that OptimizerConfig does not allow, and for a falling schedule without total_steps.
    """
    given = cast("dict[str, Any]", dict(arguments))
    total_steps, bad_numbers = given.pop("total_steps", None), given.pop("bad_numbers", BadNumbers())
    config = OptimizerConfig(**given)
    if total_steps is None and config.schedule != "constant":
        raise ConfigError(f"schedule is {config.schedule!r}, and total_steps is not given: say in how many optimizer steps it comes down")
    total_steps = 1 if total_steps is None else total_steps  # any number serves a constant schedule
    factor = choose_factor(config.schedule, warmup_steps=config.warmup_steps, total_steps=total_steps, min_lr_ratio=config.min_lr_ratio)
    plain = (config.lr, config.betas, config.eps, config.weight_decay, config.max_grad_norm)
    return AdamW(*plain, factor, config.moments, bad_numbers)


def takes(arguments: type, **changed: Any) -> Callable[[F], F]:
    """Give a function with last parameter `**name: Unpack[arguments]` a signature with each argument and its default; refuse others.

    Type checkers read Unpack; this is for help(), inspect.signature and calls: a missing or unknown argument is a TypeError with the
    function's name, as for parameters that are written out.

    Args:
        arguments: AdamWArguments, ScheduledAdamWArguments or EndingAdamWArguments.
        changed: defaults that are not those of OptimizerConfig.
    """
    known = {f.name: f.default for f in fields(OptimizerConfig)} | {"total_steps": None, "bad_numbers": BadNumbers()} | changed
    required = [name for name, hint in get_type_hints(arguments, include_extras=True).items() if get_origin(hint) is Required]
    defaults = known | dict.fromkeys(required, inspect.Parameter.empty)

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for name, hint in get_type_hints(arguments).items():
            named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint))
        signature = own.replace(parameters=named)

        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            try:
                signature.bind(*args, **keywords)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **keywords)

        cast("Any", checked).__signature__ = signature  # read by inspect.signature and help()
        return cast("F", checked)

    return decorate


def create_adamw_optimizer(
    model: torch.nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """Create a fused AdamW with weight decay on matrices only (not on norms and biases)."""
    return torch.optim.AdamW(_group_parameters(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)


def create_8bit_optimizer(
    model: torch.nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Create torchao's AdamW with moments in 8 bits, in blocks of 256.

    The source is Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization". The moments take a quarter of the memory of float32;
    tensors of less than 4,096 numbers keep float32. bfloat16 weights are rounded stochastically: up with the probability of the part that
    rounding down would lose, by torch's global generator. So updates smaller than their last bit count on average. torch.compile translates
    the update, for each shape of a parameter once: seconds on a GPU, a minute on a CPU, which needs a C++ compiler.

    Raises: ConfigError if torchao is missing or the update cannot be compiled.
    """
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports, reportUnknownVariableType]  # an extra; takes seconds
    except ImportError as error:
        raise ConfigError(
            f"moments of 8 bits need the package torchao, which cannot be imported ({error}): pip install 'rollouts-rl[low-memory]'"
        ) from error
    create = cast("Callable[..., torch.optim.Optimizer]", AdamW8bit)
    groups = _group_parameters(model, weight_decay)
    probe = torch.nn.Parameter(torch.zeros(4096, device=groups[0]["params"][0].device))
    probe.grad = torch.zeros_like(probe)
    try:
        create([probe], lr=lr).step()
    except Exception as error:  # torch.compile raises errors of many classes
        raise ConfigError(
            f"moments of 8 bits need torch.compile, which failed here: {str(error).strip():.300}. Install a C++ compiler (a CPU), or keep "
            "moments in float32"
        ) from error
    return create(groups, lr=lr, betas=betas, eps=eps, bf16_stochastic_round=True)


def check_rounding(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that no update is lost in rounding: trained weights are float32, or bfloat16 with an optimizer that rounds stochastically.

    Args:
        optimizer: None = an update that rounds to the nearest number.

    Raises: ConfigError.
    """
    stochastic = bool(getattr(optimizer, "bf16_stochastic_round", False))
    found = next((name for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32), None)
    if found is not None and not stochastic:
        raise ConfigError(
            f"parameter {found} is trained in bfloat16, whose last bit is larger than most updates: load the model in float32 (matrix "
            "products are in bfloat16 all the same, with compute_dtype bfloat16), or round stochastically, with moments='8bit' of the "
            "backend of one process"
        )


def _group_parameters(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of trained parameters that are not empty: matrices, with weight decay, and vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def create_idle_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Create an optimizer without state for a model that is never trained, since a backend must have one."""
    return torch.optim.SGD(model.parameters(), lr=0.0)
