"""A reward model scores samples as transformers does, many at a time, and fails for one sample without harm to the others."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from rollouts.backends.factory import create_critic_backend, create_reward_model_backend
from rollouts.backends.lora.adapters import add_adapters
from rollouts.backends.lora.config import LoRAConfig
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardConfig
from rollouts.data.collate import collate_samples
from rollouts.errors import ConfigError, DataError, RewardError
from rollouts.models.heads import create_reward_model, load_reward_model, reads_turn_end
from rollouts.models.loading import load_tokenizer
from rollouts.models.weights import adapted_layers, adapter_of
from rollouts.rewards.evaluate import score_group
from rollouts.rewards.gathering import gather_calls
from rollouts.rewards.models.local import (
    RewardModel,
    choose_tokenization,
    find_template_ending,
    open_reward_model,
    read_tokens,
    render_tokens,
)
from rollouts.testing import create_tiny_model
from rollouts.training.rollout_batch import select_values
from rollouts.types import Message, Sample, Status


def make_model(seed: int = 0, **options: Any) -> Any:
    return create_reward_model(create_tiny_model(seed=seed), head_std=0.5, **options)


def make_samples(n: int = 12, group_size: int = 4) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i in range(n):
        length = int(torch.randint(8, 30, (1,), generator=generator))
        tokens = tuple(torch.randint(3, 64, (length,), generator=generator).tolist())
        mask = (0.0, *(1.0,) * (length - 1))
        samples.append(Sample(tokens=tokens, loss_mask=mask, index=i, group_index=i // group_size, status=Status.COMPLETED))
    return samples


# scores


def test_scores_are_those_of_transformers_at_the_last_token():
    model, samples = make_model(), make_samples()
    reference = make_model().eval()
    with torch.no_grad():
        expected = [float(reference(input_ids=torch.tensor([s.tokens])).logits[0, 0]) for s in samples]
    found = RewardModel(model).score_samples(samples)
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(set(found)) == len(found)


def test_what_is_scored_together_changes_no_score():
    samples = make_samples()
    together = RewardModel(make_model()).score_samples(samples)
    alone = RewardModel(make_model())
    assert [alone.score_samples([sample])[0] for sample in samples] == pytest.approx(together, abs=1e-6)
    assert RewardModel(make_model(), max_tokens_per_batch=1).score_samples(samples) == pytest.approx(together, abs=1e-6)
    assert RewardModel(make_model()).score_samples(samples[::-1])[::-1] == pytest.approx(together, abs=1e-6)
    assert RewardModel(make_model()).score_rows([]) == []


def test_a_pad_token_at_the_end_is_a_token_like_others():
    """transformers looks for the last token that is not the pad token, which for many models is the end of text."""
    model = RewardModel(make_model())
    with_pad, without = model.score_rows([[5, 6, 7, 0], [5, 6, 7]])
    assert with_pad != pytest.approx(without, abs=1e-4)


def test_half_precision_weights_give_float32_scores(tmp_path: Path):
    create_reward_model_backend(make_model(), lr=1e-3).export_weights(tmp_path)
    exact = RewardModel(load_reward_model(tmp_path)).score_samples(make_samples())
    rounded = RewardModel(load_reward_model(tmp_path, dtype="bfloat16")).score_samples(make_samples())
    assert rounded == pytest.approx(exact, abs=0.2)
    assert rounded != exact


def test_a_sample_that_cannot_be_read_fails_alone():
    samples = make_samples(5)
    bad = {
        1: Sample(tokens=(), index=1),
        2: Sample(tokens=(3, 64), loss_mask=(0.0, 1.0), index=2),
        3: Sample(tokens=(3,) * 600, loss_mask=(0.0,) * 599 + (1.0,), index=3),
    }
    found = RewardModel(make_model()).score_samples([bad.get(i, sample) for i, sample in enumerate(samples)])
    expected = RewardModel(make_model()).score_samples(samples)
    assert (found[0], found[4]) == pytest.approx((expected[0], expected[4]), abs=1e-6)
    for i, words in ((1, "no tokens"), (2, "token 64, and the model has 64"), (3, "600 tokens, more than the 512")):
        assert isinstance(found[i], RewardError)
        assert words in str(found[i])


def test_a_score_that_is_not_finite_is_an_error():
    model = make_model()
    judge = RewardModel(model)
    with torch.no_grad():
        model.score.weight.fill_(math.inf)  # after it was made, which looks for such weights
    for found in judge.score_samples(make_samples(2)):
        assert isinstance(found, RewardError)
        assert "expected a finite number" in str(found)


# directories


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def save(directory: Path, **options: Any) -> Path:
    create_reward_model_backend(make_model(), lr=1e-3, tokenizer=create_char_tokenizer(), **options).export_weights(directory)
    return directory


def test_models_that_are_no_reward_models_are_refused(tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path / "language")
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM, expected one ending with ForSequenceClassification.*train_reward_model"):
        load_reward_model(tmp_path / "language")
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    change_config(save(tmp_path / "classes"), **labels)
    with pytest.raises(ConfigError, match="has 3 labels, expected 1"):
        load_reward_model(tmp_path / "classes")
    with pytest.raises(ConfigError, match="is not a directory"):
        load_reward_model(tmp_path / "nowhere")
    weights = save(tmp_path / "damaged") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(ConfigError, match=r"cannot be loaded|damaged"):
        load_reward_model(tmp_path / "damaged")


def test_a_reward_model_begins_with_what_adapters_have_learned():
    policy = create_tiny_model()
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    add_adapters(policy, LoRAConfig(rank=2))
    (name, layer), *_ = adapted_layers(policy)
    with torch.no_grad():
        adapter_of(layer)[1].fill_(0.5)
    made = create_reward_model(policy).state_dict()
    assert not torch.equal(made[f"{name}.weight"], weights[f"{name}.weight"])
    assert all(torch.equal(value, weights[other]) for other, value in made.items() if other in weights and other != f"{name}.weight")


def test_a_saved_reward_model_scores_the_same_and_can_be_trained_on(tmp_path: Path):
    samples = make_samples()
    expected = RewardModel(make_model()).score_samples(samples)
    save(tmp_path)
    model = load_reward_model(tmp_path)
    assert reads_turn_end(model)
    assert RewardModel(model).score_samples(samples) == expected
    backend = create_reward_model_backend(tmp_path, lr=1e-3)
    assert torch.equal(backend.model.score.weight, load_reward_model(tmp_path).score.weight)
    assert backend.computes == frozenset({"scores"})


async def test_a_critic_can_begin_as_a_reward_model(tmp_path: Path):
    """Its values are the scores of what was there before the token."""
    critic = create_critic_backend(save(tmp_path), lr=1e-3)
    sample = make_samples(1)[0]
    values = await critic.forward(collate_samples([sample]), select_values).result()
    scores = RewardModel(make_model()).score_rows([sample.tokens[:t] for t in range(1, len(sample.tokens))])
    assert values[0, 1:].tolist() == pytest.approx(scores, abs=1e-5)


# which tokens are read


CHAT = (Message(role="user", content="1+2="),)


def test_samples_in_the_models_own_tokens_are_read_as_they_are():
    tokenizer, model = create_char_tokenizer(), make_model()
    read = choose_tokenization(model, tokenizer, create_char_tokenizer())
    sample = Sample(prompt=CHAT, tokens=(5, 6, 7), loss_mask=(0.0, 1.0, 1.0), response="x")
    assert read(sample) == (5, 6, 7)
    assert read(Sample(tokens=(5, 6, 7, 8, 9), loss_mask=(0.0, 1.0, 0.0, 0.0, 1.0), context_starts=(2,))) == (7, 8, 9)


def test_a_model_of_others_gets_what_its_template_puts_behind_the_answer():
    tokenizer, model = create_char_tokenizer(), make_model()
    model.config.rollouts_reads_turn_end = False
    turn_end, ending = find_template_ending(tokenizer)
    assert (turn_end, tokenizer.decode(ending)) == (1, "\n")
    read = choose_tokenization(model, tokenizer, create_char_tokenizer())
    assert read(Sample(tokens=(5, 6, 1), loss_mask=(0.0, 1.0, 1.0))) == (5, 6, 1, *ending)
    assert read(Sample(tokens=(5, 6, 7), loss_mask=(0.0, 1.0, 1.0))) == (5, 6, 7), "an answer that was cut has no end"


def test_samples_in_other_tokens_are_rendered_by_the_models_own_template():
    tokenizer, policy = create_char_tokenizer(99), create_char_tokenizer(64)
    sample = Sample(prompt=CHAT, tokens=(60, 61), loss_mask=(0.0, 1.0), response="3", status=Status.COMPLETED)
    model = make_model()
    own = choose_tokenization(model, tokenizer, policy)(sample)
    assert tokenizer.decode(own) == "user: 1+2=\nassistant: 3<|eos|>"
    model.config.rollouts_reads_turn_end = False
    assert tokenizer.decode(choose_tokenization(model, tokenizer, policy)(sample)) == "user: 1+2=\nassistant: 3<|eos|>\n"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    same_vocabulary = create_char_tokenizer(99)
    assert tokenizer.decode(choose_tokenization(model, tokenizer, same_vocabulary)(sample)) == "1+2=|3|"


def test_plain_prompts_need_no_template():
    tokenizer: Any = create_char_tokenizer()
    tokenizer.chat_template = None
    sample = Sample(prompt="s31=", response="13", tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED)
    assert tokenizer.decode(render_tokens(sample, tokenizer=tokenizer)) == "s31=13<|eos|>"
    cut = Sample(prompt="s31=", response="13", tokens=(1,), loss_mask=(1.0,), status=Status.TRUNCATED)
    assert tokenizer.decode(render_tokens(cut, tokenizer=tokenizer)) == "s31=13"
    with pytest.raises(DataError, match="no chat template"):
        render_tokens(Sample(prompt=CHAT, response="3", tokens=(1,), loss_mask=(1.0,)), tokenizer=tokenizer)


def test_an_answer_that_was_cut_off_has_no_end_of_turn():
    tokenizer: Any = create_char_tokenizer()
    cut = Sample(prompt=CHAT, response="3", tokens=(1,), loss_mask=(1.0,), status=Status.TRUNCATED)
    for to_turn_end in (False, True):
        text = tokenizer.decode(render_tokens(cut, tokenizer=tokenizer, to_turn_end=to_turn_end))
        assert text.endswith("assistant: 3"), text


# as a reward function


async def test_groups_are_scored_by_a_directory(tmp_path: Path):
    save(tmp_path)
    group = tuple(make_samples(6, 6))
    expected = RewardModel(make_model()).score_samples(group)
    async with open_reward_model(tmp_path, policy_tokenizer=load_tokenizer(tmp_path)) as reward:
        scored = await score_group(group, reward)
        assert scored is not None
        assert [sample.reward for sample in scored] == pytest.approx(expected, abs=1e-6)
        assert (reward.num_batches, reward.num_samples) == (1, 6)
    with pytest.raises(RewardError, match="outside its `async with` block"):
        await reward(group[0])


async def test_a_bad_sample_follows_the_policy_for_failed_rewards():
    group = (*make_samples(2), Sample(tokens=(99,), loss_mask=(1.0,), index=9, status=Status.COMPLETED))
    async with open_reward_model(make_model()) as reward:
        assert await score_group(group, reward, RewardConfig(on_error="drop")) is None
        with pytest.raises(RewardError, match=r"reward model cannot read sample 9.*token 99"):
            await score_group(group, reward)


async def test_a_tokenizer_to_compare_with_is_needed():
    with pytest.raises(ConfigError, match="give both"):
        async with open_reward_model(make_model(), policy_tokenizer=create_char_tokenizer()):
            pass


# calls that are gathered


class Recorder:
    """Scores that are known, and which samples came together."""

    def __init__(self, seconds: float = 1.0, error: Exception | None = None) -> None:
        self.batches: list[list[int]] = []
        self.num_running = self.most_running = 0
        self.seconds, self.error = seconds, error

    async def score(self, samples: Any) -> list[Any]:
        self.batches.append([sample.index for sample in samples])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await trio.sleep(self.seconds)
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        return [float(sample.index) for sample in samples]


async def ask_all(reward: Any, samples: Any) -> list[float]:
    found: dict[int, float] = {}

    async def ask(sample: Sample) -> None:
        found[sample.index] = await reward(sample)

    async with trio.open_nursery() as nursery:
        for sample in samples:
            nursery.start_soon(ask, sample)
    return [found[sample.index] for sample in samples]


async def test_calls_at_the_same_time_are_one_batch_in_the_order_of_the_samples(autojump_clock: Any):
    recorder = Recorder()
    async with gather_calls(recorder.score, name="r") as reward:
        assert await ask_all(reward, make_samples(8)[::-1]) == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert recorder.batches == [list(range(8))]


async def test_calls_while_a_batch_is_scored_are_the_next_one(autojump_clock: Any):
    recorder, samples = Recorder(), make_samples(9)

    async def ask_later(reward: Any, sample: Sample) -> None:
        await trio.sleep(0.1 * sample.index)
        assert await reward(sample) == sample.index

    async with gather_calls(recorder.score, name="r", max_samples=5) as reward, trio.open_nursery() as nursery:
        for sample in samples:
            nursery.start_soon(ask_later, reward, sample)
    assert recorder.batches == [[0], [1, 2, 3, 4, 5], [6, 7, 8]]
    assert recorder.most_running == 1


async def test_several_batches_run_at_once_where_that_is_wanted(autojump_clock: Any):
    recorder = Recorder()
    async with gather_calls(recorder.score, name="r", max_samples=2, max_batches=3) as reward:
        assert await ask_all(reward, make_samples(10)) == [float(i) for i in range(10)]
    assert recorder.most_running == 3
    assert sorted(i for batch in recorder.batches for i in batch) == list(range(10))


async def test_a_caller_that_gives_up_harms_no_other(autojump_clock: Any):
    recorder, samples = Recorder(), make_samples(6)
    found: list[float] = []

    async def ask(reward: Any, sample: Sample, patience: float) -> None:
        with trio.move_on_after(patience):
            found.append(await reward(sample))

    async with gather_calls(recorder.score, name="r", max_samples=3) as reward:
        async with trio.open_nursery() as nursery:
            for sample in samples:
                nursery.start_soon(ask, reward, sample, 0.5 if sample.index in (0, 4) else 100)
        assert sorted(found) == [1.0, 2.0, 3.0, 5.0]
        assert reward.num_waiting == 0
    assert recorder.batches == [[0, 1, 2], [3, 5]], "nothing is computed for who no longer waits"


async def test_a_wrong_number_of_scores_and_an_error_of_the_whole_batch_reach_every_caller(autojump_clock: Any):
    async def too_few(samples: Any) -> list[float]:
        return [1.0] * (len(samples) - 1)

    for score, words in ((too_few, "r gave 2 scores for 3 samples"), (Recorder(error=RewardError("no luck")).score, "no luck")):
        errors: list[str] = []

        async def ask(reward: Any, sample: Sample, errors: list[str] = errors) -> None:
            with pytest.raises(RewardError) as caught:
                await reward(sample)
            errors.append(str(caught.value))

        async with gather_calls(score, name="r") as reward, trio.open_nursery() as nursery:
            for sample in make_samples(3):
                nursery.start_soon(ask, reward, sample)
        assert len(errors) == 3
        assert all(words in text for text in errors)


async def test_a_mistake_in_the_scoring_ends_the_block_and_leaves_nobody_waiting(autojump_clock: Any):
    with trio.fail_after(60), pytest.raises(ZeroDivisionError):
        async with gather_calls(Recorder(error=ZeroDivisionError()).score, name="r") as reward:
            await ask_all(reward, make_samples(3))


async def test_leaving_the_block_answers_who_still_waits(autojump_clock: Any):
    outcome: list[str] = []

    async def ask(reward: Any, sample: Sample) -> None:
        try:
            await reward(sample)
        except RewardError as error:
            outcome.append(str(error))

    with trio.fail_after(60):
        async with trio.open_nursery() as outside:
            async with gather_calls(Recorder(seconds=50).score, name="r", max_samples=1) as reward:
                for sample in make_samples(2):
                    outside.start_soon(ask, reward, sample)
                await trio.sleep(1)
    assert len(outcome) == 2
    assert all("was closed before it scored" in text for text in outcome)


def test_the_last_context_is_read_and_the_ending_only_behind_the_end_of_a_turn():
    sample = Sample(tokens=(3, 4, 1, 5, 6, 1), loss_mask=(0.0, 1.0, 1.0, 0.0, 1.0, 1.0), context_starts=(3,))
    assert read_tokens(sample) == (5, 6, 1)
    assert partial(read_tokens, turn_end=1, ending=(8,))(sample) == (5, 6, 1, 8)
    assert partial(read_tokens, turn_end=2, ending=(8,))(sample) == (5, 6, 1)
