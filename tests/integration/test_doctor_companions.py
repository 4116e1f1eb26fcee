"""The doctor's checks of the models beside the policy: a critic and teachers that are right pass, broken ones are caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.doctor.companions import check_scores, check_teacher
from integration.doctor.examine import examine
from integration.doctor.findings import Finding
from integration.doctor.heads import check_critic
from integration.doctor.numbers import choose_rows, create_reference
from integration.settings.command_line import parse_command_line
from rollouts.backends.factory import create_critic_backend, create_reference_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import BadNumbers
from rollouts.testing import FakeVLLMServer, create_tiny_model
from rollouts.training.distillation.teachers import ModelTeacher

ROWS = choose_rows([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12]], window=None, context=64, vocab_size=64)
SMALL = ["--mode", "rl", "--model.hidden-size", "32", "--model.intermediate-size", "32", "--model.num-layers", "1"]
SMALL += ["--evaluation.num-prompts", "4", "--rl.prompts-per-step", "3", "--rl.samples-per-prompt", "2"]


def save_model(path: Path, vocab_size: int = 64, **options: Any) -> Path:
    model: Any = create_tiny_model(vocab_size=vocab_size, hidden_size=32, num_layers=1, **options)
    model.save_pretrained(path)
    create_char_tokenizer(vocab_size).save_pretrained(str(path))
    return path


async def diagnose(directory: Path, *argv: str) -> dict[str, Finding]:
    """All findings on the built-in model with these options."""
    threads = torch.get_num_threads()
    found = await examine(parse_command_line([*SMALL, *argv]), num_rows=4, directory=directory, say=lambda text: None)
    torch.set_num_threads(threads)
    return {finding.check: finding for finding in found}


# -- the critic


async def test_a_right_critic_passes_and_keeps_its_weights():
    critic = create_critic_backend(create_tiny_model(), lr=1e-2, total_steps=10)
    before = dict(await critic.get_weights().result())
    finding = await check_critic(critic, critic.model, ROWS)
    num_weights = len(list(critic.model.parameters()))
    assert finding.status == "pass" and f"reaches {num_weights} of {num_weights} weights" in finding.found
    after = await critic.get_weights().result()
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_a_critic_whose_values_are_not_finite_is_caught():
    critic = create_critic_backend(create_tiny_model(), lr=1e-2, total_steps=10)
    with torch.no_grad():
        critic.model.score.weight.fill_(float("nan"))
    finding = await check_critic(critic, critic.model, ROWS)
    assert finding.status == "fail" and "values are not finite" in finding.found


async def test_a_critic_that_the_gradient_does_not_reach_is_caught():
    critic = create_critic_backend(create_tiny_model(), lr=1e-2, total_steps=10)
    for name, weight in critic.model.named_parameters():
        weight.requires_grad_(name.startswith("score."))  # the head alone is trained
    finding = await check_critic(critic, critic.model, ROWS)
    assert finding.status == "warn" and "reaches 2 of" in finding.found and "embed_tokens" in finding.found
    for hook in (critic.model.score.weight.register_hook, critic.model.score.bias.register_hook):
        hook(torch.zeros_like)
    assert (await check_critic(critic, critic.model, ROWS)).status == "fail", "nothing is trained"


async def test_a_critic_of_two_values_for_each_token_is_caught():
    critic: Any = create_critic_backend(create_tiny_model(), lr=1e-2, total_steps=10)
    forward = critic.forward
    critic.forward = lambda batch, output_fn, **options: forward(batch, lambda outputs: torch.stack([outputs.values] * 2, -1), **options)
    finding = await check_critic(critic, critic.model, ROWS)
    assert finding.status == "fail" and "expected one for each token" in finding.found and ", 2) for tokens" in finding.found


@pytest.mark.parametrize("policy", ["skip", "stop"])
async def test_a_critic_whose_gradient_is_not_finite_is_caught(policy: Any):
    critic = create_critic_backend(create_tiny_model(), lr=1e-2, total_steps=10, bad_numbers=BadNumbers(gradient=policy))
    before = dict(await critic.get_weights().result())
    for weight in critic.model.parameters():
        weight.register_hook(lambda gradient: gradient * float("nan"))
    finding = await check_critic(critic, critic.model, ROWS)
    num_weights = len(before)
    assert finding.status == "fail" and f"is not finite at {num_weights} of {num_weights} weights" in finding.found
    assert "no update could be applied" in finding.advice
    after = await critic.get_weights().result()
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_the_doctor_examines_the_critic_of_ppo_and_one_with_other_tokens_is_caught(tmp_path: Path):
    found = await diagnose(tmp_path, "--rl.algorithm", "ppo")
    assert found["critic"].status == "pass" and "tokens of other models" not in found and "teacher" not in found
    found = await diagnose(tmp_path, "--rl.algorithm", "ppo", "--critic.path", str(save_model(tmp_path / "own")))
    assert found["critic"].status == found["tokens of other models"].status == "pass"
    found = await diagnose(tmp_path, "--rl.algorithm", "ppo", "--critic.path", str(save_model(tmp_path / "other", 99)))
    assert found["tokens of other models"].status == "fail" and "critic.path is" in found["tokens of other models"].found
    assert "critic" not in found, "its values would be those of other texts"


# -- teachers


def make_teacher(num_tops: int = 0, broken: bool = False) -> ModelTeacher:
    backend = create_reference_backend(create_tiny_model(), num_tops=num_tops)
    if broken:
        with torch.no_grad():
            backend.model.model.norm.weight.fill_(float("inf"))
    return ModelTeacher(backend=backend)


async def test_log_probs_of_a_teacher_that_are_none_are_caught():
    judge = {"vocab_size": 64, "precision": "float32"}
    finding, _ = await check_teacher(make_teacher(6), ROWS, {"teacher_tops"}, **judge)
    assert finding.status == "warn" and "add up to 1" in finding.found, "its weights are random: no better than chance"
    finding, batch = await check_teacher(make_teacher(), ROWS, {"teacher_log_probs"}, **judge)
    assert finding.status == "warn" and "knows no more of these answers than chance" in finding.advice
    finding, _ = await check_teacher(make_teacher(broken=True), ROWS, {"teacher_log_probs"}, **judge)
    assert finding.status == "fail" and "not finite" in finding.found

    class Shifted(ModelTeacher):
        async def fill(self, batch: Any, *args: Any, **options: Any) -> Any:
            return replace(await super().fill(batch, *args, **options), teacher_tops=torch.zeros(*batch.tokens.shape, 7))

    finding, _ = await check_teacher(Shifted(backend=make_teacher(6).backend), ROWS, {"teacher_tops"}, **judge)
    assert finding.status == "fail", "the probabilities of everything add up to more than 1"
    reference = create_reference(create_tiny_model())
    assert check_scores(batch, ROWS, reference, precision="float32").status == "pass"
    other = create_reference(create_tiny_model(seed=5))
    assert check_scores(batch, ROWS, other, precision="float32").status == "fail"
    hot = [replace(row, temperature=2.0) for row in ROWS]
    assert check_scores(batch, hot, reference, precision="float32").status == "skip"


@pytest.mark.parametrize("algorithm", ["opd", "gkd"])
async def test_the_doctor_examines_a_teacher_that_is_a_model(algorithm: str, tmp_path: Path):
    found = await diagnose(tmp_path, "--rl.algorithm", algorithm, "--teacher.path", str(save_model(tmp_path / "teacher")))
    assert found["tokens of other models"].status == "pass" and found["teacher"].status in ("pass", "warn"), found
    assert "nats per token of 4 answers of the policy" in found["teacher"].found
    assert ("add up to 1" in found["teacher"].found) == (algorithm == "gkd")


async def test_a_teacher_with_other_tokens_is_caught(tmp_path: Path):
    found = await diagnose(tmp_path, "--rl.algorithm", "opd", "--teacher.path", str(save_model(tmp_path / "teacher", 99)))
    assert found["tokens of other models"].status == "fail" and "teacher.path is" in found["tokens of other models"].found
    assert "teacher" not in found


async def test_the_scores_of_a_server_are_compared_with_its_models_own(tmp_path: Path):
    directory, other = save_model(tmp_path / "teacher"), save_model(tmp_path / "other", seed=5)
    tokenizer: Any = create_char_tokenizer()
    for served, status in ((directory, "pass"), (other, "fail")):
        async with FakeVLLMServer(served, tokenizer=tokenizer) as server:
            argv = ["--rl.algorithm", "opd", "--teacher.url", server.url, "--teacher.tokenizer", str(directory)]
            found = await diagnose(tmp_path, *argv, "--generation.temperature", "1.0")
        assert found["teacher's server"].status == status, found["teacher's server"]


async def test_the_policy_with_a_context_is_examined_as_a_teacher(tmp_path: Path):
    found = await diagnose(tmp_path, "--rl.algorithm", "opd", "--teacher.context", "{prompt}{feedback}")
    assert found["teacher"].status == "warn" and "teacher's server" not in found
