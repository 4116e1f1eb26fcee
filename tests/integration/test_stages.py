"""The RL stage with what its algorithm needs beside the policy: a reference model, a critic, a KL controller; interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.expressions.algorithm import resolve_algorithm
from integration.parts import models
from integration.parts.model_settings import check_companions
from integration.parts.models import Companions, create_companions, create_model
from integration.run.stages import RunControl, run_rl, run_sft
from integration.settings.command_line import name_as_typed
from integration.settings.config import Config
from integration.settings.made.library import create_kl_control
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.model import CriticSection, ModelSection, ReferenceSection
from integration.settings.sections.records import TrajectorySection
from integration.settings.sections.stages import KLControlSection, RLSection
from integration.tasks.task import create_sort_task
from rollouts.algorithms.presets import decoupled, grpo, ppo
from rollouts.backends.factory import create_reference_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import OptimizerConfig
from rollouts.data.samples import group_samples
from rollouts.data.trajectories import read_records, read_samples
from rollouts.errors import ConfigError, GenerationError
from rollouts.models.heads import create_reward_model
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import JSONLLogger, read_metrics, truncate_log
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import read_run_state
from rollouts.types import Sample


def count_even(sample: Sample) -> float:
    """A reward that differs from sample to sample, whatever the model has learned."""
    return sum(token % 2 == 0 for token in sample.tokens[-4:]) / 4


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Makes the configuration of a run that takes a second, whose rewards differ from sample to sample."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)

    def create(algorithm: str, **sections: Any) -> Config:
        rl = {"num_steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4, "algorithm": algorithm, **sections.pop("rl", {})}
        return Config(
            rl=RLSection(**{"optimizer": OptimizerConfig(lr=3e-3), **rl}),
            model=ModelSection(hidden_size=32, intermediate_size=32, num_layers=1),
            evaluation=EvaluationSection(num_prompts=4, sampled=False),
            **sections,
        )

    return create


async def run(
    config: Config, directory: Path, stop_after: int | None = None, reward_fn: Callable[[Sample], float] = count_even
) -> list[dict[str, Any]]:
    """The RL lines of a run; stopped after so many steps, if given."""
    directory.mkdir(exist_ok=True)
    steps_done: list[int] = []

    def should_stop() -> bool:
        steps_done.append(1)
        return stop_after is not None and len(steps_done) >= stop_after

    checkpoint = latest_checkpoint(directory / "rl" / "checkpoints")
    if checkpoint is not None:
        truncate_log(directory / "metrics.jsonl", read_run_state(checkpoint).metrics_bytes)
    logger = JSONLLogger(directory / "metrics.jsonl")
    task = replace(create_sort_task(num_train=64, num_heldout=4), reward_fn=reward_fn)
    await run_rl(config, directory / "rl", None, RunControl(logger=logger, should_stop=should_stop), task=task)
    logger.finish()
    return [line for line in read_metrics(directory / "metrics.jsonl") if line["step"] > 0]


def values(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


RESUMED = {
    "ppo": ("ppo(kl_coef=0.05)", {}),
    "ppo with a critic that begins alone": ("ppo()", {"critic": CriticSection(warmup_steps=1, value_clip=0.05)}),
    "adaptive kl_coef": ("ppo(kl_coef=0.05)", {"rl": {"kl_control": KLControlSection(target=1e-4, horizon=100.0)}}),
    "kl in the loss": ("grpo(kl_coef=0.5)", {}),
    "remax": ("remax", {"rl": {"samples_per_prompt": 2}}),
    "decoupled": ("decoupled(dapo(clip_high=0.28), cap=5.0)", {"rl": {"sync_every": 2, "num_minibatches": 4}}),
}


@pytest.mark.parametrize("name", [name if name in ("ppo", "decoupled") else pytest.param(name, marks=pytest.mark.slow) for name in RESUMED])
async def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(name: str, start: Callable[..., Config], tmp_path: Path):
    algorithm, sections = RESUMED[name]
    config = start(algorithm, **sections)
    whole = await run(config, tmp_path / "whole")
    await run(config, tmp_path / "parts", stop_after=2)
    assert values(await run(config, tmp_path / "parts")) == values(whole)
    assert [line["step"] for line in whole] == [1, 2, 3, 4]


async def test_the_options_of_an_algorithm_show_in_its_metrics(start: Callable[..., Config], tmp_path: Path):
    plain = (await run(start("grpo"), tmp_path / "grpo"))[-1]
    assert not {"kl_coef", "reference_kl", "ref_kl", "critic_loss", "importance_weight"} & set(plain)
    in_loss = (await run(start("grpo(kl_coef=0.5)"), tmp_path / "loss"))[-1]
    assert in_loss["ref_kl"] > 0 and in_loss["reference_kl"] != 0 and "kl_coef" not in in_loss
    lines = await run(start("ppo(kl_coef=0.05)", critic=CriticSection(optimizer=OptimizerConfig(lr=0.02))), tmp_path / "reward")
    assert {line["critic_lr"] for line in lines} == {0.02}
    assert {"reference_kl", "critic_loss", "value_mean", "explained_variance"} <= set(lines[-1])
    assert (await run(start("decoupled(grpo())"), tmp_path / "decoupled"))[-1]["importance_weight"] == pytest.approx(1.0, abs=1e-3)


OWN_KL = """
from dataclasses import replace
from functools import partial
from rollouts.algorithms.presets import grpo
from rollouts.algorithms.estimators import estimate_reinforce_plus_plus
from rollouts.algorithms.kl import k1
from rollouts.types import Algorithm

def twice(kl_coef: float = 0.1) -> Algorithm:
    return grpo(kl_coef=kl_coef * 2)

def both(reward: float, loss: float) -> Algorithm:
    return replace(grpo(kl_coef=loss), estimate=partial(estimate_reinforce_plus_plus, kl=k1, kl_coef=reward))

def closure() -> Algorithm:
    inner = grpo(kl_coef=0.1)
    return replace(inner, loss=lambda outputs, batch: inner.loss(outputs, batch))
"""


async def test_the_coefficient_of_a_kl_term_is_the_algorithms_own_unless_a_controller_is_asked_for(
    start: Callable[..., Config], tmp_path: Path
):
    (tmp_path / "own.py").write_text(OWN_KL)
    numbers = {"rl": {"num_steps": 2, "num_minibatches": 4}}
    losses = {}
    for name in ("own.py:twice(kl_coef=0.1)", "grpo(kl_coef=0.2)", "grpo(kl_coef=0.1)"):
        lines = await run(start(name, **numbers), tmp_path / f"{len(losses)}")
        assert all("kl_coef" not in line and "reference_kl" in line for line in lines)
        losses[name] = [line["loss"] for line in lines]
    assert losses["own.py:twice(kl_coef=0.1)"] == losses["grpo(kl_coef=0.2)"] != losses["grpo(kl_coef=0.1)"]


@pytest.mark.parametrize(
    ("algorithm", "begins"),
    [
        ("grpo(kl_coef=0.2)", 0.2),
        ("own.py:twice(kl_coef=0.1)", 0.2),
        ("ppo(kl_coef=0.3)", 0.3),
        ("decoupled(grpo(kl_coef=0.4))", 0.4),
        ("own.py:both(0.5, 0.5)", 0.5),
    ],
)
def test_a_controller_begins_at_the_number_that_the_algorithm_really_has(
    algorithm: str, begins: float, start: Callable[..., Config], tmp_path: Path
):
    (tmp_path / "own.py").write_text(OWN_KL)
    config = start(algorithm, rl={"kl_control": KLControlSection(target=0.1)})
    control = create_kl_control(config, resolve_algorithm(algorithm, 8))
    assert control is not None and control.kl_coef == begins
    assert create_kl_control(start(algorithm), resolve_algorithm(algorithm, 8)) is None


async def test_the_kl_to_the_reference_is_measured_without_a_forward_pass_for_it(start: Callable[..., Config], tmp_path: Path):
    numbers = {"num_minibatches": 1, "num_steps": 2}
    seen = {}
    for name, rl in (("own", {}), ("controlled", {"kl_control": KLControlSection(kl_coef=0.5)})):
        seen[name] = (await run(start("recomputed(grpo(kl_coef=0.5))", rl=numbers | rl), tmp_path / name))[-1]
    assert seen["own"]["reference_kl"] == pytest.approx(seen["controlled"]["reference_kl"], abs=1e-5)
    assert seen["own"]["loss"] == pytest.approx(seen["controlled"]["loss"], rel=1e-4)
    assert "kl_coef" not in seen["own"] and seen["controlled"]["kl_coef"] == 0.5


async def test_each_option_of_an_algorithm_changes_what_is_trained(start: Callable[..., Config], tmp_path: Path):
    changed = {
        "as it is": start("ppo(kl_coef=0.05)", rl={"num_steps": 2}),
        "by its estimator": start("gae(kl_coef=0.05)", rl={"num_steps": 2}),
        "discount": start("ppo(gamma=0.5, kl_coef=0.05)", rl={"num_steps": 2}),
        "lambda": start("ppo(lam=0.5, kl_coef=0.05)", rl={"num_steps": 2}),
        "clip": start("ppo(clip_low=0.001, clip_high=0.001, kl_coef=0.05)", rl={"num_steps": 2}),
        "penalty": start("ppo(kl_coef=5.0)", rl={"num_steps": 2}),
        "entropy": start("ppo(entropy_coef=0.1, kl_coef=0.05)", rl={"num_steps": 2}),
        "epochs": start("ppo(kl_coef=0.05)", rl={"num_steps": 2, "num_epochs": 2}),
        "learning rate": start("ppo(kl_coef=0.05)", rl={"num_steps": 2, "optimizer": OptimizerConfig(lr=1e-3)}),
        "value clip": start("ppo(kl_coef=0.05)", rl={"num_steps": 2}, critic=CriticSection(value_clip=1e-4)),
    }
    last = {name: (await run(config, tmp_path / name))[-1] for name, config in changed.items()}
    seen = {name: (line["loss"], line["grad_norm"], line["critic_loss"]) for name, line in last.items()}
    assert seen.pop("by its estimator") == seen["as it is"]
    assert len(set(seen.values())) == len(seen), seen
    assert last["clip"]["clip_fraction"] > last["as it is"]["clip_fraction"]
    assert last["value clip"]["value_clip_fraction"] > last["as it is"]["value_clip_fraction"]


async def test_remax_gets_a_greedy_sample_in_each_group_and_trains_on_the_others(start: Callable[..., Config], tmp_path: Path):
    config = start("remax", rl={"samples_per_prompt": 2}, trajectories=TrajectorySection(every=1))
    lines = await run(config, tmp_path / "run")
    assert {line["num_samples"] for line in lines} == {8} and all("baseline_reward_mean" in line for line in lines)
    groups = group_samples(read_samples(tmp_path / "run" / "rl" / "trajectories" / "step_0001.jsonl"), group_size=3)
    assert [[sample.trainable for sample in group] for group in groups] == [[True, True, False]] * 4
    estimates = [r.estimate for r in read_records(tmp_path / "run" / "rl" / "trajectories" / "step_0001.jsonl") if r.estimate is not None]
    rewards = [tuple(sample.reward for sample in group) for group in groups]
    assert [estimate.group_rewards for estimate in estimates] == [of_group for of_group in rewards for _ in range(3)]
    found = [max(estimate.advantages or (), key=abs) for estimate in estimates]
    assert found == pytest.approx([r for one, two, greedy in rewards for r in (one - greedy, two - greedy, 0.0)])  # type: ignore[operator]
    plain = await run(start("rloo", rl={"samples_per_prompt": 2}), tmp_path / "plain")
    assert plain[0]["reward_mean"] == lines[0]["reward_mean"], "the samples that are trained on are the same ones"


async def test_long_answers_are_penalized_and_cut_ones_left_out_on_request(start: Callable[..., Config], tmp_path: Path):
    plain = (await run(start("dapo"), tmp_path / "plain"))[0]
    assert plain["num_truncated"] > 0
    masked = (await run(start("dapo", rl={"mask_truncated": True}), tmp_path / "masked"))[0]
    assert masked["num_tokens"] < plain["num_tokens"] and masked["reward_mean"] == plain["reward_mean"]
    rl = {"overlong_buffer": 4, "overlong_penalty": 0.5}
    penalized = (await run(start("dapo", rl=rl), tmp_path / "penalized"))[0]
    assert penalized["shaped_reward_mean"] <= plain["reward_mean"] - 0.5 * plain["truncated_fraction"] + 1e-6
    assert penalized["reward_mean"] == plain["reward_mean"] and "shaped_reward_mean" not in plain
    assert penalized["num_tokens"] == plain["num_tokens"] and penalized["loss"] != plain["loss"]
    both = (await run(start("dapo", rl=rl | {"mask_truncated": True}), tmp_path / "both"))[0]
    assert both["shaped_reward_mean"] == penalized["shaped_reward_mean"], "a row that is masked has its length all the same"


async def test_dynamic_sampling_judges_the_reward_of_the_task_not_the_penalty_on_long_answers(start: Callable[..., Config], tmp_path: Path):
    rl = {"filter": "nonzero_std", "max_filter_attempts": 2, "overlong_buffer": 4}
    with pytest.raises(GenerationError, match="check_reward_nonzero_std passed 0 of 8 groups"):
        await run(start("dapo", rl=rl), tmp_path / "all right", reward_fn=lambda sample: 1.0)
    trajectories = TrajectorySection(every=1)
    config = start("dapo", rl=rl | {"num_steps": 1, "max_filter_attempts": 50}, trajectories=trajectories)
    await run(config, tmp_path / "run", reward_fn=lambda sample: float(sample.tokens[-1] % 2))
    written = group_samples(read_samples(tmp_path / "run" / "rl" / "trajectories" / "step_0001.jsonl"), group_size=4)
    assert [{sample.reward for sample in group} for group in written] == [{0.0, 1.0}] * 4


async def test_an_adaptive_kl_coefficient_moves_towards_its_target(start: Callable[..., Config], tmp_path: Path):
    control = KLControlSection(kl_coef=0.1, target=1e-3, horizon=100.0)
    lines = await run(start("ppo(kl_coef=0.05)", rl={"kl_control": control}), tmp_path / "run")
    kl_coef = 0.1
    for line in lines:
        assert line["kl_coef"] == pytest.approx(kl_coef)
        kl_coef *= 1 + min(max(line["reference_kl"] / 1e-3 - 1, -0.2), 0.2) * 16 / 100
    assert len({line["kl_coef"] for line in lines}) == 4


async def test_a_critic_that_begins_alone_leaves_the_policy_as_it_is(start: Callable[..., Config], tmp_path: Path):
    lines = await run(start("ppo()", critic=CriticSection(warmup_steps=2)), tmp_path / "run")
    assert [line["num_updates"] for line in lines] == [0, 0, 2, 2]
    assert [line["eval_accuracy"] for line in lines[:2]] == [lines[0]["eval_accuracy"]] * 2
    assert all("critic_loss" in line for line in lines)


def count_models(config: Config, algorithm: Any) -> tuple[int, Companions]:
    """Parameters beside the policy's."""
    model, tokenizer = create_model(config)
    companions = create_companions(config, algorithm.requires, model, tokenizer, critic_steps=8)
    backends: list[Any] = [backend for backend in (companions.reference, companions.critic) if backend is not None]
    return sum(p.numel() for backend in backends for p in backend.model.parameters()), companions


def test_no_model_is_made_that_the_algorithm_does_not_need(start: Callable[..., Config], monkeypatch: pytest.MonkeyPatch):
    config = start("grpo")
    policy = sum(p.numel() for p in create_model(config)[0].parameters())
    assert count_models(config, grpo()) == (0, Companions())
    assert count_models(config, decoupled(grpo())) == (0, Companions())
    assert count_models(config, grpo(kl_coef=0.1))[0] == policy
    assert policy < count_models(config, ppo())[0] < policy + 100  # the value head in place of the tied output layer
    assert count_models(config, ppo(kl_coef=0.1))[0] == policy + count_models(config, ppo())[0]
    model, tokenizer = create_model(config)
    monkeypatch.setattr("copy.deepcopy", lambda model: pytest.fail("a model was copied"))
    assert create_companions(config, grpo().requires, model, tokenizer, critic_steps=8) == Companions()


async def test_the_reference_is_the_policy_as_it_was_when_rl_began_also_after_resume(
    start: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[torch.Tensor] = []

    def remember(model: Any, **options: Any) -> Any:
        made.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        return create_reference_backend(model, **options)

    monkeypatch.setattr(models, "create_reference_backend", remember)
    config = start("grpo(kl_coef=0.1)")
    first = torch.cat([p.detach().flatten() for p in create_model(config)[0].parameters()])
    await run(config, tmp_path / "run", stop_after=2)
    await run(config, tmp_path / "run")
    assert len(made) == 2 and all(torch.equal(weights, first) for weights in made)


@pytest.fixture
def same_tokens(tmp_path: Path) -> Path:
    """A language model of the built-in tokenizer."""
    create_tiny_model(seed=3).save_pretrained(tmp_path / "same")
    create_char_tokenizer().save_pretrained(tmp_path / "same")
    return tmp_path / "same"


@pytest.fixture
def other_tokens(tmp_path: Path) -> Path:
    """A language model of another tokenizer."""
    create_tiny_model(vocab_size=80).save_pretrained(tmp_path / "other")
    create_char_tokenizer(80).save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@pytest.mark.parametrize("name", ["reference", "critic"])
def test_a_model_with_other_tokens_is_refused(name: str, start: Callable[..., Config], same_tokens: Path, other_tokens: Path):
    def create(path: Path) -> Config:
        section = ReferenceSection(path=str(path)) if name == "reference" else CriticSection(path=str(path))
        return start("ppo(kl_coef=0.1)", **{name: section})

    check_companions(create(same_tokens))
    with pytest.raises(ConfigError, match=rf"{name}\.path is .*other, whose tokens are not the policy's: .* leave --{name}\.path out"):
        check_companions(create(other_tokens))
    with pytest.raises(ConfigError, match=rf"^{name}\.path is '.*nowhere': .*is not a directory"):
        check_companions(create(other_tokens / "nowhere"))
    check_companions(create(other_tokens), other_tokens)  # the policy that RL begins with


def test_a_reward_model_is_no_reference(start: Callable[..., Config], same_tokens: Path, tmp_path: Path):
    create_reward_model(create_tiny_model(), seed=0).save_pretrained(tmp_path / "rm")
    create_char_tokenizer(64).save_pretrained(tmp_path / "rm")
    with pytest.raises(
        ConfigError, match=r"expected a causal language model .* Give --reference\.path the directory or name of a language"
    ):
        check_companions(start("grpo(kl_coef=0.1)", reference=ReferenceSection(path=str(tmp_path / "rm"))))


async def test_a_critic_is_made_of_a_model_for_which_transformers_has_no_class_with_a_head(start: Callable[..., Config], tmp_path: Path):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 64}
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).save_pretrained(tmp_path / "gemma")
    create_char_tokenizer(64).save_pretrained(tmp_path / "gemma")
    lines = await run(replace(start("ppo"), model=ModelSection(path=str(tmp_path / "gemma"))), tmp_path / "run")
    assert all("explained_variance" in line for line in lines)


async def test_other_models_can_be_named(start: Callable[..., Config], same_tokens: Path, tmp_path: Path):
    config = start("ppo(kl_coef=0.1)", reference=ReferenceSection(path=str(same_tokens)))
    _, companions = count_models(config, ppo(kl_coef=0.1))
    reference: Any = companions.reference
    expected = create_tiny_model(seed=3).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in reference.model.state_dict().items())
    assert (await run(config, tmp_path / "run"))[0]["reference_kl"] > 1e-3, "another model from the first step on"
    critic = tmp_path / "run" / "rl" / "checkpoints" / "step_0004" / "critic"
    config = start("ppo", critic=CriticSection(path=str(critic)))
    again: Any = count_models(config, ppo())[1].critic
    saved: Any = count_models(replace(config, critic=CriticSection()), ppo())[1].critic
    assert not torch.equal(again.model.score.weight, saved.model.score.weight)
    check_companions(config)


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        (
            "grpo",
            {"reference": ReferenceSection(path="x")},
            r"reference.path is 'x', but rl.algorithm 'grpo' has no KL term: give it a kl_coef",
        ),
        (
            "grpo",
            {"critic": CriticSection(path="x")},
            r"critic.path is 'x', but rl.algorithm 'grpo' has no critic: choose one with a critic, such as ppo",
        ),
        ("grpo", {"critic": CriticSection(warmup_steps=1)}, "critic.warmup_steps is 1, but .* no critic"),
        (
            "ppo",
            {"critic": CriticSection(warmup_steps=4)},
            "critic.warmup_steps is 4 of rl.num_steps = 4: the policy would never be trained",
        ),
        ("ppo", {"rl": {"kl_control": KLControlSection(target=0.1)}}, r"rl.kl_control is set, but rl.algorithm 'ppo' has no KL term"),
        ("ppo(kl_coef=0.1)", {"rl": {"kl_control": KLControlSection(kl_coef=0.0, target=0.1)}}, "which no factor can change"),
        ("ppo(kl_coef=0.1)", {"rl": {"kl_control": KLControlSection(target=-0.1)}}, "target is -0.1"),
        ("ppo", {"critic": CriticSection(value_clip=0.0)}, "value_clip is 0.0"),
        ("decoupled(grpo, segment_wise=True)", {}, "is segment-wise, but enable_segment_wise_ppo is off: add --enable-segment-wise-ppo"),
        ("dapo", {"rl": {"overlong_buffer": 9}}, "rl.overlong_buffer is 9, expected at most the token budget of a response, 8"),
        ("dapo", {"rl": {"overlong_buffer": -1}}, "overlong_buffer is -1"),
        ("dapo", {"rl": {"overlong_penalty": -1.0}}, "overlong_penalty is -1.0"),
        (
            "own.py:closure",
            {"rl": {"kl_control": KLControlSection(target=0.1)}},
            "does not state its kl_coef: give --rl.kl-control",
        ),
        (
            "own.py:both(0.5, 0.25)",
            {"rl": {"kl_control": KLControlSection(kl_coef=0.1)}},
            r"KL terms with different coefficients \(0.5 in the reward and 0.25 in the loss\)",
        ),
    ],
)
def test_settings_that_would_change_nothing_are_refused(
    algorithm: str, sections: dict[str, Any], message: str, start: Callable[..., Config], tmp_path: Path
):
    (tmp_path / "own.py").write_text(OWN_KL)
    with pytest.raises(ConfigError, match=message):
        _ = start(algorithm, **sections).algorithm


@pytest.mark.parametrize(("stage", "option"), [("sft", "router_balance_coef"), ("rl", "router_balance_coef"), ("rl", "router_replay")])
async def test_experts_of_a_model_without_them_are_refused_by_the_option_before_any_evaluation(tmp_path: Path, stage: str, option: str):
    config = Config()
    section = replace(getattr(config, stage), **{option: True if option == "router_replay" else 0.1})
    said: list[str] = []
    with pytest.raises(ConfigError, match="is set, but") as caught:
        if stage == "sft":
            await run_sft(replace(config, sft=section), tmp_path, RunControl(say=said.append))
        else:
            await run_rl(replace(config, rl=section), tmp_path, None, RunControl(say=said.append))
    flag = f"--{stage}.{option.replace('_', '-')}"
    assert name_as_typed([], Config(), str(caught.value)).startswith(f"{flag} is set, but"), caught.value
    assert not said and not list(tmp_path.iterdir())
