"""The doctor: each of its checks passes on parts that are right, and catches a part that is broken on purpose."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import CHATML, create_tokenizer
from torch import Tensor

from integration.doctor.__main__ import main, split_options
from integration.doctor.findings import Finding, tabulate
from integration.doctor.numbers import (
    check_engine,
    check_loss,
    check_repeats,
    check_splits,
    check_sync,
    check_trainer,
    choose_prompts,
    choose_rows,
    create_reference,
    find_window,
)
from integration.doctor.resume import REWARD_MODEL, compare_lines, forget_later, run_shortly, shorten
from integration.doctor.rewards import check_reward
from integration.doctor.texts import check_end, check_masks, check_pairs, check_template, check_tokenizer
from integration.settings.command_line import parse_command_line
from integration.train_reward_model import parse
from rollouts.backends.factory import create_backend_with_scheduler
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import prepare_sft_sample
from rollouts.config import RewardConfig
from rollouts.data.preference_pairs import PreferencePair, prepare_preference_pair
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.protocol import EngineFeature
from rollouts.errors import ConfigError
from rollouts.testing import create_tiny_model
from rollouts.types import Completion, Prompt, Sample, SamplingParams

ROWS = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]
PROMPTS = [[3, 4, 5, 6], [9, 10, 11]]


def create_backend(model: Any) -> Any:
    return create_backend_with_scheduler(model, lr=1e-3, total_steps=10)


def copy_of(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


def create_windowed_model(window: int | None) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(3)
    return MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256, sliding_window=window)).eval()


# -- texts


def conversation(tokenizer: Any) -> Sample:
    messages = [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "quite well"}]
    return prepare_sft_sample(tokenizer, messages)


def test_masks_and_ends_of_right_rows_pass():
    tokenizer = create_tokenizer(CHATML)
    sample = conversation(tokenizer)
    stop = frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert check_masks(tokenizer, [sample]).status == "pass"
    assert check_end(tokenizer, [sample], stop).status == "pass"


@pytest.mark.parametrize(
    ("shift", "told"), [(-3, "not trained on as a whole"), (4, "not trained on as a whole"), (None, "a message of the user is trained on")]
)
def test_a_wrong_mask_is_caught(shift: int | None, told: str):
    tokenizer = create_tokenizer(CHATML)
    sample = conversation(tokenizer)
    mask = (1.0,) * len(sample.tokens) if shift is None else sample.loss_mask[shift:] + sample.loss_mask[:shift]
    finding = check_masks(tokenizer, [replace(sample, loss_mask=mask)])
    assert finding.status == "fail" and told in finding.found


def test_a_row_without_a_trained_token_is_caught():
    tokenizer = create_tokenizer(CHATML)
    sample = conversation(tokenizer)
    assert check_masks(tokenizer, [replace(sample, loss_mask=(0.0,) * len(sample.tokens))]).status == "fail"


def test_an_end_that_is_not_trained_on_is_caught():
    tokenizer = create_tokenizer(CHATML)
    sample = conversation(tokenizer)
    last = max(p for p, mask in enumerate(sample.loss_mask) if mask)
    cut = replace(sample, loss_mask=tuple(0.0 if p >= last else mask for p, mask in enumerate(sample.loss_mask)))
    stop = frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert check_end(tokenizer, [cut], stop).status == "fail"
    assert check_end(tokenizer, [cut, sample], stop).status == "warn"
    assert check_end(tokenizer, [sample], frozenset([0])).status == "fail", "the engine stops at another token"


def pair_of(prompt: str, chosen: str, rejected: str) -> PreferencePair:
    return prepare_preference_pair(
        create_char_tokenizer(64), {"prompt": prompt, "chosen": chosen, "rejected": rejected}, whole_answers=True
    )


def test_pairs_that_contradict_or_are_told_by_their_length_are_caught():
    good = [pair_of(f"s{k}=", *(("1", "22") if k % 2 else ("11", "2"))) for k in range(20)]
    finding = check_pairs(good)
    assert finding.status == "pass" and "20 pairs" in finding.found and "in 50%" in finding.found
    long = check_pairs([pair_of(f"s{k}=", "111", "2") for k in range(20)])
    assert long.status == "warn" and "the chosen answer is longer in 100%" in long.found
    turned = [*good, pair_of("s3=", "22", "1")]
    assert check_pairs(turned).status == "warn" and "2 of 21 pairs stand in the data the other way round" in check_pairs(turned).found
    assert check_pairs([*turned[:2], *(pair_of("s9=", *both) for both in (("1", "2"), ("2", "1")))]).status == "fail"
    assert check_pairs(()).status == "skip"


def test_labelled_answers_of_one_kind_are_told():
    answers = [replace(pair_of("s3=", "22", "1").chosen, reward=float(k > 2)) for k in range(20)]
    assert check_pairs(answers).status == "warn" and "17 of 20 answers are good" in check_pairs(answers).found
    assert check_pairs(answers[:6]).status == "pass"


DROPS_THINKING = CHATML.replace("message['content']", "(message['content'].split('</think>')[-1] if not loop.last else message['content'])")
DROPS_ALWAYS = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")


def test_a_template_that_drops_thinking_is_caught():
    assert check_template(create_tokenizer(CHATML), several_turns=True).status == "pass"
    finding = check_template(create_tokenizer(DROPS_THINKING), several_turns=True)
    assert finding.status == "fail" and "drops the thinking of earlier turns" in finding.found
    assert check_template(create_tokenizer(DROPS_THINKING), several_turns=False).status == "warn"
    assert check_template(create_tokenizer(DROPS_ALWAYS), several_turns=False).status == "fail", "not what the data says"
    assert check_template(create_tokenizer(None), several_turns=True).status == "skip"


def test_a_tokenizer_of_another_model_is_caught():
    tokenizer = create_char_tokenizer(64)
    assert check_tokenizer(tokenizer, 64, ["s41=", "14"]).status == "pass"
    assert check_tokenizer(tokenizer, 20, ["xyz"]).status == "fail", "its ids are beyond the model's embeddings"
    assert check_tokenizer(tokenizer, 64, ["日本"]).status == "fail", "it knows none of the characters"


def test_a_pretrained_model_that_is_no_better_than_chance_is_told():
    reference = create_reference(create_tiny_model())
    assert check_now(check_loss(reference, ROWS, vocab_size=64, is_pretrained=True)).status == "warn"
    assert check_now(check_loss(lambda row: torch.full((len(row),), -1.0), ROWS, vocab_size=64, is_pretrained=True)).status == "pass"
    assert check_now(check_loss(lambda row: torch.full((len(row),), -5.0), ROWS, vocab_size=64, is_pretrained=True)).status == "fail"
    assert check_now(check_loss(reference, ROWS, vocab_size=64, is_pretrained=False)).status == "skip"


def check_now(coroutine: Any) -> Finding:
    """Return the result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it awaited something")


# -- rewards


PROBLEMS = [Prompt(content=f"s{k}27=", index=k, metadata={"ground_truth": f"27{k}"}) for k in range(3, 7)]


async def judge(reward_fn: Any, prompts: Sequence[Prompt] = PROBLEMS) -> dict[str, Finding]:
    findings = await check_reward(reward_fn, prompts, lambda text: [3] * len(text), config=RewardConfig())
    return {finding.check: finding for finding in findings}


async def test_a_right_reward_passes():
    found = await judge(lambda sample: float(sample.response == sample.metadata["ground_truth"]))
    assert {finding.status for finding in found.values()} == {"pass"}


async def test_rewards_that_leak_are_caught():
    copied = await judge(lambda sample: float(sample.response[:1] == "s" or sample.response == sample.metadata["ground_truth"]))
    assert copied["reward leaks"].status == "fail" and "a copy of the prompt" in copied["reward leaks"].found
    told = [replace(prompt, content=f"{prompt.content} (it is {prompt.metadata['ground_truth']})") for prompt in PROBLEMS]
    inside = await judge(lambda sample: float(sample.response == sample.metadata["ground_truth"]), told)
    assert inside["reward leaks"].status == "fail" and "contain their own ground truth" in inside["reward leaks"].found


async def test_answers_to_choose_from_the_prompt_are_no_leak():
    offered = [replace(prompt, content=f"{prompt.content} one of 273, 274, 275, 276") for prompt in PROBLEMS]
    found = (await judge(lambda sample: float(sample.response == sample.metadata["ground_truth"]), offered))["reward leaks"]
    assert found.status == "warn" and "4 that of another row as well" in found.found and "to be chosen" in found.advice


async def test_rewards_that_vary_fail_or_say_nothing_are_caught():
    calls: list[int] = []
    varying = await judge(lambda sample: float(len(calls)) if calls.append(1) is None else 0.0)
    assert varying["reward repeats"].status == "warn"
    constant = await judge(lambda sample: 1.0)
    assert constant["reward range"].status == "warn" and constant["reward of right answers"].status == "warn"
    assert constant["reward leaks"].status == "fail" and "an empty answer gets" in constant["reward leaks"].found
    assert (await judge(lambda sample: 0.0))["reward leaks"].status == "pass", "a reward that pays nothing gives nothing away"
    broken = await judge(lambda sample: 1 / 0 if not sample.response else 1.0)
    assert broken["reward"].status == "fail" and "division by zero" in broken["reward"].found
    assert (await judge(None))["reward"].status == "skip"


async def test_a_slow_reward_is_told():
    ticks = iter([0.0, 60.0])
    findings = await check_reward(
        lambda sample: 1.0, PROBLEMS, lambda text: [3] * len(text), config=RewardConfig(), clock=lambda: next(ticks)
    )
    assert next(f for f in findings if f.check == "reward speed").status == "warn"


# -- numbers


async def test_a_right_trainer_passes():
    model = create_tiny_model()
    rows = choose_rows(ROWS, window=None, context=512, vocab_size=64)
    backend = create_backend(copy_of(model))
    assert (await check_trainer(backend, create_reference(model), rows, precision="float32", window=None)).status == "pass"
    assert (await check_repeats(backend, rows)).status == "pass"
    assert (await check_splits(backend, rows, precision="float32")).status == "pass"
    assert (await check_splits(backend, rows[:1], precision="float32")).status == "skip", "nothing is split"
    kept = await backend.get_weights().result()
    assert all(torch.equal(kept[name], weight) for name, weight in model.state_dict().items()), "the check of splits restores the weights"


async def test_a_head_that_is_left_out_is_caught():
    """The head of a tied model is its embedding; a trainer whose head has weights of its own computes another model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    tied = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    untied = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
    untied.load_state_dict({name: w for name, w in tied.state_dict().items() if name != "lm_head.weight"}, strict=False)
    rows = choose_rows(ROWS, window=None, context=512, vocab_size=64)
    assert (
        await check_trainer(create_backend(copy_of(tied)), create_reference(tied), rows, precision="float32", window=None)
    ).status == "pass"
    assert (await check_trainer(create_backend(untied), create_reference(tied), rows, precision="float32", window=None)).status == "fail"


def test_a_checkpoint_without_a_head_is_refused_with_the_setting_that_ties_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = create_tiny_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    create_char_tokenizer(64).save_pretrained(str(tmp_path))
    found = examine(capsys, ["--mode", "sft", "--model.path", str(tmp_path)])
    assert found["model"].status == "fail" and found["resume"].status == "skip"
    assert "lm_head.weight" in found["model"].found and "say so by tie_word_embeddings true" in found["model"].found
    assert main(["--mode", "sft", "--model.path", str(tmp_path / "none")]) == 2, "a path that is none is a mistake in the options"


async def test_an_ignored_window_is_caught_and_rows_that_cannot_show_it_are_told():
    model = create_windowed_model(16)
    ignoring = create_windowed_model(None)
    ignoring.load_state_dict(model.state_dict())
    window = find_window(model.config)
    assert window == 16 and find_window(ignoring.config) is None
    rows = choose_rows(ROWS, window=window, context=256, vocab_size=64)
    assert max(len(row.tokens) for row in rows) >= 40
    check = {"precision": "float32", "window": window}
    assert (await check_trainer(create_backend(copy_of(model)), create_reference(model), rows, **check)).status == "pass"
    ignored = await check_trainer(create_backend(ignoring), create_reference(model), rows, **check)
    assert ignored.status == "fail" and "the first 16 tokens of each row, a window, agree" in ignored.found
    assert "sliding_window" in ignored.advice
    short = choose_rows(ROWS, window=window, context=12, vocab_size=64)
    blind = await check_trainer(create_backend(create_windowed_model(None)), create_reference(create_windowed_model(None)), short, **check)
    assert blind.status == "warn" and "none is longer than a window" in blind.found


class NoisyMLP(torch.nn.Module):
    """A layer whose dropout eval() leaves on, as functional.dropout does by default."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.mlp(hidden), 0.3)


def test_a_model_with_dropout_of_its_own_is_refused_for_that():
    model = create_tiny_model()
    model.model.layers[0].mlp = NoisyMLP(model.model.layers[0].mlp)
    with pytest.raises(ConfigError, match="gives other results for the same row each time: its code has dropout"):
        create_backend(model)


async def test_dropout_is_caught():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.5))
    backend = create_backend(model)
    backend.model.eval = lambda: backend.model.train(True)  # a backend that forgets to turn dropout off
    assert (await check_repeats(backend, choose_rows(ROWS, window=None, context=512, vocab_size=64))).status == "fail"


class BrokenEngine:
    """An engine with a fault that is planted in one of its methods."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine, self.features, self.name = engine, frozenset([EngineFeature.MEMORY_UPDATES]), "broken"

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        return await self.engine.generate(prompt_tokens, params, request_id=request_id)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        await self.engine.abort(request_ids)

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        return await self.engine.update_weights_from_checkpoint(checkpoint_path)

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        return await self.engine.update_weights(weights, weight_version)

    async def get_weight_version(self) -> int:
        return await self.engine.get_weight_version()


class WrongTemperature(BrokenEngine):
    """It samples at temperature 1 whatever is asked for."""

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        found = await self.engine.generate(prompt_tokens, params.new(temperature=1.0), request_id=request_id)
        return replace(found, temperature=params.temperature)


class StaleKeys(BrokenEngine):
    """Keys and values of kept prompts outlive an update of the weights."""

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        slots = self.engine._slots
        forget, slots.forget = slots.forget, lambda: None
        try:
            return await self.engine.update_weights(weights, weight_version)
        finally:
            slots.forget = forget


class DeafEngine(BrokenEngine):
    """It confirms new weights and goes on with the old ones."""

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        return {"success": True, "weight_version": weight_version}


async def check_with(kind: Any, *, prompts: Sequence[Sequence[int]] = PROMPTS) -> tuple[dict[str, str], Finding]:
    model = create_tiny_model()
    backend = create_backend(copy_of(model))
    async with InProcessEngine(model) as inner:
        engine = inner if kind is None else kind(inner)
        findings = await check_engine(engine, backend, prompts, precision="float32", temperature=1.3)
        return {f.check: f.status for f in findings}, await check_sync(engine, backend, prompts, precision="float32")


async def test_a_right_engine_passes():
    statuses, sync = await check_with(None)
    assert set(statuses.values()) == {"pass"} and len(statuses) == 3 and sync.status == "pass"


async def test_a_wrong_temperature_is_caught():
    model = create_tiny_model()
    async with InProcessEngine(model) as inner:
        findings = await check_engine(
            WrongTemperature(inner), create_backend(copy_of(model)), PROMPTS, precision="float32", temperature=1.3
        )
    assert all("at temperature 1 the two agree" in finding.advice for finding in findings[1:])
    statuses = {f.check: f.status for f in findings}
    assert statuses == {
        "engine log-probs, temperature 1": "pass",
        "engine log-probs, temperature 0.7": "fail",
        "engine log-probs, temperature 1.3": "fail",
    }


async def test_stale_keys_and_values_are_caught_however_short_the_prompts_of_the_data_are():
    long = choose_rows(ROWS, window=None, context=512, vocab_size=64)[-1].tokens
    _, sync = await check_with(StaleKeys, prompts=choose_prompts(PROMPTS, long, context=512))
    assert sync.status == "fail"


def test_prompts_for_an_engine_leave_room_for_the_answer():
    long = choose_rows(ROWS, window=40, context=512, vocab_size=64)[-1].tokens
    assert [len(prompt) for prompt in choose_prompts([[1] * 100, [1], [1, 2]], long, context=512)] == [64, 1, len(long) - 33]
    assert [len(prompt) for prompt in choose_prompts([[1, 2]], long, context=50)] == [1, 17]
    assert [len(prompt) for prompt in choose_prompts([[1, 2]], long, context=33)] == [1]
    assert choose_prompts([], long, context=512) == []


async def test_weights_that_do_not_arrive_are_caught():
    _, sync = await check_with(DeafEngine)
    assert sync.status == "fail"


def test_the_short_runs_of_the_resume_check_publish_nothing_and_tell_no_logger():
    argv = ["--log", "wandb(project='mine')", "--push-to-hub", "me/mine", "--rl.num-steps", "500", *shorten("rl"), "--output-dir", "x"]
    command = parse_command_line(argv)
    assert (command.push_to_hub, command.config.loggers, command.config.rl.num_steps) == (None, (), 3)
    assert command.config.output_dir == "x"
    for own in (
        ["--trajectories.groups", "2"],
        ["--task", "calculator", "--trajectories.steps"],
        ["--trajectories.condition", "math:isfinite"],
    ):
        assert parse_command_line([*own, *shorten("rl")]).config.trajectories == parse_command_line(own).config.trajectories
    assert parse_command_line(["--algorithm", "ppo", "--critic.warmup-steps", "5", *shorten("rl")]).config.critic.warmup_steps == 0
    for mode in ("dpo", "sft+dpo"):
        preference = parse_command_line(["--preference.num-steps", "500", *shorten(mode)]).config.preference
        assert (preference.num_steps, preference.checkpoint_every) == (3, 1), "a run of all its steps would take too long"


def test_the_second_checkpoint_is_there_to_be_killed_and_resumed_at(tmp_path: Path):
    """A run may keep one checkpoint only, and a fast one writes its third before the kill."""
    for mode in ("sft", "rl", "sft+dpo"):
        assert parse_command_line(["--checkpoint.keep-last-n", "1", *shorten(mode)]).config.checkpoint.keep_last_n == 3
    assert parse(["--training.keep-last-n", "1", *shorten(REWARD_MODEL)]).config.training.keep_last_n == 3
    for step in (1, 2, 3):
        (tmp_path / f"step_{step:04d}" / "weights").mkdir(parents=True)
    forget_later(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0001", "step_0002"]
    forget_later(tmp_path / "missing")


def test_a_run_that_says_much_does_not_stop_the_resume_check(tmp_path: Path):
    (tmp_path / "loud.py").write_text("import sys\nprint('word ' * 100_000, file=sys.stderr)\n")  # more than a pipe holds, and no config
    assert "loud.py" in run_shortly(["--config", str(tmp_path / "loud.py")], None, 60.0)


def test_numbers_that_differ_after_a_resume_are_named_and_times_are_not_compared():
    first = [{"step": 1, "loss": 0.5, "step_s": 3.0}, {"step": 2, "loss": 0.25, "step_s": 3.0}]
    second = [{"step": 1, "loss": 0.5, "step_s": 4.0}, {"step": 2, "loss": 0.26}]
    assert compare_lines(first, first) == []
    assert compare_lines(first, second) == ["loss of step 2: 0.25 and 0.26"]
    assert compare_lines(first, first[:1]) == ["2 lines and 1"]


# -- the command


def test_own_options_are_split_from_those_of_the_run():
    options, rest = split_options(["--rows", "3", "--mode", "rl", "--resume-timeout-s=0", "--json", "--rl.num-steps", "2"])
    assert (options.rows, options.resume_timeout_s, options.as_json) == (3, 0.0, True)
    assert rest == ["--mode", "rl", "--rl.num-steps", "2"]
    for wrong in (["--rows", "x"], ["--rows", "0"], ["--rows", "1.5"], ["--rows"], ["--resume-timeout-s", "-1"]):
        with pytest.raises(ConfigError, match=wrong[0]):
            split_options(wrong)


def test_a_table_has_a_row_for_each_check_and_counts_them():
    findings = [Finding(check="a", status="pass", found="fine"), Finding(check="bb", status="fail", found="wrong", advice="mend it")]
    assert tabulate(findings).splitlines() == ["PASS  a   fine", "FAIL  bb  wrong", " " * 10 + "-> mend it", "", "1 pass, 1 fail"]


def test_the_command_examines_the_users_own_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Rows whose prompts contain their answers: one check fails, and the exit status says so."""
    rows = [{"prompt": f"say {k}27", "ground_truth": f"{k}27"} for k in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def right(sample):\n    return float(sample.response == sample.metadata['ground_truth'])\n")
    create_tiny_model(vocab_size=99).save_pretrained(tmp_path / "model")
    create_char_tokenizer(99).save_pretrained(str(tmp_path / "model"))
    argv = ["--model.path", str(tmp_path / "model"), "--generation.max-tokens", "8"]
    argv += ["--mode", "rl", "--data.path", str(tmp_path / "rows.jsonl"), "--reward.function", f"{tmp_path / 'reward.py'}:right"]
    argv += ["--rows", "4", "--resume-timeout-s", "0", "--json", "--evaluation.num-prompts", "2"]
    threads = torch.get_num_threads()
    assert main(argv) == 1
    torch.set_num_threads(threads)
    statuses = {finding["check"]: finding["status"] for finding in json.loads(capsys.readouterr().out)}
    assert statuses["reward leaks"] == "fail"
    assert [check for check, status in statuses.items() if status == "fail"] == ["reward leaks"]
    assert statuses["weight sync"] == statuses["trainer log-probs"] == statuses["splits change nothing"] == "pass"


@pytest.fixture
def model(tmp_path: Path) -> str:
    create_tiny_model(vocab_size=99).save_pretrained(tmp_path / "model")
    create_char_tokenizer(99).save_pretrained(str(tmp_path / "model"))
    return str(tmp_path / "model")


def examine(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Finding]:
    """Run the command without the check of resuming; its findings by their names."""
    threads = torch.get_num_threads()
    main([*argv, "--resume-timeout-s", "0", "--json", "--rows", "4"])
    torch.set_num_threads(threads)
    out = capsys.readouterr()
    assert out.out, out.err
    return {finding["check"]: Finding(**finding) for finding in json.loads(out.out)}


def test_ids_that_the_model_has_not_are_a_finding_and_no_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The tokenizer of another model, in the user's own directory: the checks that a forward pass would crash in are left out."""
    create_tiny_model(vocab_size=20).save_pretrained(tmp_path / "model")
    create_char_tokenizer(64).save_pretrained(str(tmp_path / "model"))
    rows = [{"prompt": f"say {k}27", "ground_truth": f"{k}27"} for k in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def right(sample):\n    return float(sample.response == sample.metadata['ground_truth'])\n")
    argv = ["--mode", "rl", "--model.path", str(tmp_path / "model"), "--data.path", str(tmp_path / "rows.jsonl")]
    found = examine(capsys, [*argv, "--reward.function", f"{tmp_path / 'reward.py'}:right"])
    assert found["tokenizer"].status == "fail" and "but the model has 20 embeddings" in found["tokenizer"].found
    assert found["log-probs"].status == "skip" and "trainer log-probs" not in found


def test_rows_that_cannot_be_read_are_a_failed_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A template that drops the thinking of earlier turns, and the tokenizer of another model, with rows that a run would refuse."""
    answer = "<think>\nadd\n</think>\n\nIt is 2."
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": answer}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [*turns, *turns]}) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "chosen": "2"}) + "\n")
    for name, template, size in (("drops", DROPS_THINKING, 512), ("other", CHATML, 20)):
        create_tiny_model(vocab_size=size).save_pretrained(tmp_path / name)
        create_tokenizer(template).save_pretrained(str(tmp_path / name))
    sft = ["--mode", "sft", "--data.path", str(tmp_path / "rows.jsonl")]
    found = examine(capsys, [*sft, "--model.path", str(tmp_path / "drops")])
    assert [finding.status for finding in found.values()] == ["fail", "warn", "skip"]
    assert "rows.jsonl, line 1: the chat template renders" in found["data"].found and "of the model" in found["data"].advice
    assert "drops the thinking of earlier turns" in found["chat template"].found
    found = examine(capsys, [*sft, "--model.path", str(tmp_path / "other")])
    assert found["data"].status == "fail" and "made with another tokenizer" in found["data"].found
    scores = ["train-reward-model", "--data.path", str(tmp_path / "pairs.jsonl"), "--data.num-heldout", "1"]
    found = examine(capsys, [*scores, "--model.path", str(tmp_path / "drops")])
    assert found["data"].status == "fail" and found["resume"].status == "skip"


def test_the_answers_of_preferences_are_examined(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]):
    rows = [{"prompt": f"s{k}27=", "chosen": f"{k}72", "rejected": f"{k}7"} for k in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = examine(capsys, ["--mode", "dpo", "--model.path", model, "--data.path", str(tmp_path / "pairs.jsonl")])
    for check in ("tokenizer", "loss masks", "end of answers", "trainer log-probs", "splits change nothing"):
        assert found[check].status == "pass", found[check]
    assert "in 8 rows" in found["loss masks"].found, "both answers of four pairs"
    assert "128 rows" in found["speed of the trainer"].found, "64 pairs of a step"
    assert found["preferences"].status == "warn" and "longer in 100%" in found["preferences"].found


def test_a_run_on_several_processes_is_examined_on_one(capsys: pytest.CaptureFixture[str]):
    found = examine(capsys, ["--mode", "sft", "--backend.kind", "fsdp", "--backend.num-processes", "2"])
    assert found["several processes"].status == "skip" and found["trainer log-probs"].status == "pass"


def test_options_that_cannot_be_used_are_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert main(["--dry-run"]) == 2
    assert os.environ["HF_HUB_OFFLINE"] == "1", "nothing on the hub is named, so no network is asked"
    assert "leave --resume and --dry-run out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--resume-timeout-s" in capsys.readouterr().out


def test_the_page_names_each_check_and_its_command_is_understood():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    command, scorer = re.findall(r"^rollouts doctor (.*)$", page, re.MULTILINE)
    assert parse(shlex.split(scorer)[1:]).config.data.path == "pairs.jsonl"
    options, rest = split_options(shlex.split(command))
    assert options.rows == 8 and parse_command_line(rest).config.reward.function == "rewards.py:my_reward"
    named = "tokenizer, chat template, loss masks, end of answers, reward leaks, loss on the data, trainer log-probs, log-probs repeat"
    beside = ("tokens of other models", "critic", "teacher", "teacher's server")
    for check in (*named.split(", "), "preferences", "weight sync", *beside, "splits change nothing", "memory", "resume"):
        assert f"| {check} |" in page, check


CALCULATOR = ("--task", "calculator", "--rl.prompts-per-step", "4", "--rl.samples-per-prompt", "2", "--resume-timeout-s", "0")
"""A run with environments is stopped and resumed by tests of its own."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("argv", "resumed"), [pytest.param((), "pass", marks=pytest.mark.long), pytest.param(CALCULATOR, "skip", marks=pytest.mark.slow)]
)
def test_the_default_job_and_an_episode_task_are_sound(argv: tuple[str, ...], resumed: str, capsys: pytest.CaptureFixture[str]):
    assert main([*argv, "--json", "--rows", "4"]) == 0
    statuses = {finding["check"]: finding["status"] for finding in json.loads(capsys.readouterr().out)}
    assert statuses["resume"] == resumed and "fail" not in statuses.values()
