"""The arguments that every factory of a backend takes alike."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from rollouts.backends.factory import (
    create_backend_with_scheduler,
    create_critic_backend,
    create_pytorch_backend,
    create_reward_model_backend,
)
from rollouts.backends.fsdp.factory import create_fsdp_backend, create_fsdp_critic_backend, create_fsdp_reward_model_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.jax.backend import create_jax_backend
from rollouts.backends.optim.optimizers import ScheduledAdamWArguments, create_adamw_optimizer, create_rule
from rollouts.backends.optim.schedules import create_scheduler
from rollouts.config import BadNumbers, OptimizerConfig
from rollouts.errors import ConfigError
from rollouts.testing import create_tiny_model

ADAMW = ("lr", "betas", "eps", "weight_decay", "max_grad_norm", "moments")
SCHEDULED = {
    create_critic_backend, create_reward_model_backend, create_torch_func_backend, create_jax_backend,
    create_fsdp_backend, create_fsdp_critic_backend, create_fsdp_reward_model_backend,
}  # fmt: skip
EVERY = sorted(SCHEDULED | {create_pytorch_backend, create_backend_with_scheduler}, key=lambda create: create.__name__)
every_factory = pytest.mark.parametrize("create", EVERY, ids=lambda create: create.__name__)


def steps(create):
    return {"total_steps": 5} if create is create_backend_with_scheduler else {}


def test_what_a_configuration_says_of_an_optimizer_is_what_a_factory_takes():
    hints = get_type_hints(OptimizerConfig)
    assert get_type_hints(ScheduledAdamWArguments) == hints | {"total_steps": int | None, "bad_numbers": BadNumbers}
    rule = create_rule(**vars(OptimizerConfig(lr=0.1, betas=(0.5, 0.6), eps=0.2, weight_decay=0.3, max_grad_norm=4.0, warmup_steps=4)))
    assert (rule.lr, rule.betas, rule.eps, rule.weight_decay, rule.max_grad_norm) == (0.1, (0.5, 0.6), 0.2, 0.3, 4.0)
    assert [rule.schedule(step) for step in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [create_rule(lr=1, schedule="linear", total_steps=4, min_lr_ratio=0.5).schedule(step) for step in (0, 2, 4)] == [1, 0.75, 0.5]


@every_factory
def test_each_argument_is_named_with_its_default(create):
    parameters = inspect.signature(create).parameters
    defaults = {field.name: field.default for field in fields(OptimizerConfig)} | {"lr": inspect.Parameter.empty, "total_steps": None}
    own = {name: defaults[name] for name in ADAMW} if create is create_pytorch_backend else defaults
    if create is create_backend_with_scheduler:
        own |= {"schedule": "cosine", "total_steps": inspect.Parameter.empty}
    assert {name: parameters[name].default for name in own} == own
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    assert "weight_decay: float = 0.0" in pydoc.render_doc(create)


@every_factory
def test_a_missing_or_unknown_argument_is_told_with_the_name_of_the_function(create):
    with pytest.raises(TypeError, match=rf"{create.__name__}\(\) missing a required argument: 'lr'"):
        create("nowhere", **steps(create))
    with pytest.raises(TypeError, match=rf"{create.__name__}\(\) got an unexpected keyword argument 'learning_rate'"):
        create("nowhere", lr=1e-3, learning_rate=1e-3, **steps(create))


@every_factory
def test_values_are_refused_before_a_model_is_looked_for(create):
    for wrong in ({"lr": -1}, {"lr": 1, "betas": (0.9, 1.0)}, {"lr": 1, "eps": -1}, {"lr": 1, "max_grad_norm": 0}):
        with pytest.raises(ConfigError, match=f"OptimizerConfig.{[*wrong][-1]} is "):
            create("nowhere", **wrong, **steps(create))
    if create is not create_pytorch_backend:
        with pytest.raises(ConfigError, match=r"schedule is 'cosin': did you mean 'cosine'\?"):
            create("nowhere", lr=1, schedule="cosin", **steps(create))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_that_falls_must_know_until_when(schedule):
    with pytest.raises(ConfigError, match=f"schedule is '{schedule}', and total_steps is not given"):
        create_critic_backend("nowhere", lr=1e-3, schedule=schedule)


def test_a_schedule_of_an_unknown_name_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    with pytest.raises(ConfigError, match=r"schedule is 'linaer': did you mean 'linear'\?"):
        create_scheduler(optimizer, "linaer")


def test_weight_decay_is_for_matrices_only():
    model = create_tiny_model()
    groups = create_adamw_optimizer(model, lr=1e-3, weight_decay=0.1).param_groups
    assert all((p.dim() >= 2) == (g["weight_decay"] > 0) for g in groups for p in g["params"])
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_a_learning_rate_without_a_schedule_is_left_alone():
    """A learning rate that is changed by hand stays so after the next step."""
    assert create_pytorch_backend(create_tiny_model(), lr=1e-3).scheduler is None
