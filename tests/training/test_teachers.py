"""Teachers fill the columns of a batch: from a model, from servers over real sockets, by a field of the row, and with a context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from rollouts.algorithms.presets import gkd, opd
from rollouts.backends.factory import create_reference_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.collate import collate_samples
from rollouts.engines.http.checks import AtLeast
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError, DataError, EngineError
from rollouts.outcomes import RewardDetails
from rollouts.testing import FakeBackend, FakeSGLangServer, FakeVLLMServer, ScriptedModel, create_tiny_model
from rollouts.training.distillation.context import TeacherContext
from rollouts.training.distillation.teachers import EngineTeacher, ModelTeacher, TeacherByColumn
from rollouts.training.requirements import check_requirements
from rollouts.types import KeptTokens, Message, Sample

TOKENIZER: Any = create_char_tokenizer()
LOG_PROBS = {"teacher_log_probs"}
create_model = partial(create_tiny_model, hidden_size=16, num_layers=1)


def make_rows(*texts: str, **fields: Any) -> list[Sample]:
    """Samples of prompt and response, split at "|", with the field `kind` a, b, a, ..."""
    rows = []
    for i, text in enumerate(texts):
        prompt, response = text.split("|")
        own = tokenize_prompt(TOKENIZER, prompt)
        answer = tokenize_prompt(TOKENIZER, response)
        metadata = {"kind": "ab"[i % 2], "ground_truth": "123"}
        rows.append(
            Sample(
                prompt=prompt, tokens=own + answer, loss_mask=(0.0,) * len(own) + (1.0,) * len(answer), index=i, metadata=metadata, **fields
            )
        )
    return rows


def score(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of each token by transformers' own forward pass; 0 for the first."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        found = (model(ids).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found])


async def test_a_model_scores_the_sampled_tokens_at_their_temperature():
    samples = [*make_rows("s12=|12", "s321=|1234"), *make_rows("s9=|9", temperature=0.5)]
    batch = collate_samples(samples)
    teacher = ModelTeacher(backend=create_reference_backend(create_model(seed=3)))
    found = (await teacher.fill(batch, samples, LOG_PROBS, max_tokens=6)).teacher_log_probs
    assert found is not None
    for row, sample in enumerate(samples):
        n = len(sample.tokens)
        torch.testing.assert_close(found[row, :n], score(create_model(seed=3), sample.tokens, sample.temperature), atol=1e-5, rtol=1e-4)
    assert teacher.fills == LOG_PROBS


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_scores_as_the_same_model_does_here(kind: str, tmp_path: Path):
    model = create_model(seed=3)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    samples = make_rows("s12=|12", "s321=|1234", "s55=|5")
    samples.append(Sample(tokens=(4, 5, 6, 4, 7, 8), loss_mask=(0.0, 0.0, 1.0, 0.0, 0.0, 1.0), context_starts=(3,), index=3))
    batch = collate_samples(samples)
    expected = await ModelTeacher(backend=create_reference_backend(create_model(seed=3))).fill(batch, samples, LOG_PROBS, max_tokens=100)
    server, engine = (FakeVLLMServer, VLLMEngine) if kind == "vllm" else (FakeSGLangServer, SGLangEngine)
    async with server(tmp_path, tokenizer=TOKENIZER) as one, engine(one.url, vocab_size=64) as scorer:
        found = await EngineTeacher(engines=(scorer,), max_requests=2).fill(batch, samples, LOG_PROBS, max_tokens=1)
        assert found.teacher_log_probs is not None and expected.teacher_log_probs is not None
        torch.testing.assert_close(
            found.teacher_log_probs * batch.loss_mask, expected.teacher_log_probs * batch.loss_mask, atol=1e-4, rtol=0
        )
        assert await scorer.get_weight_version() == 0, "a teacher's server keeps its weights"
        for size in (64, 60):
            async with engine(one.url, vocab_size=AtLeast(size)) as larger:
                assert len(await larger.recompute_output_log_probs(samples[0].tokens, 4, 1.0)) == len(samples[0].tokens) - 4
    for size in (99, 63, AtLeast(65)):
        with pytest.raises(EngineError, match="vocabulary"):
            async with server(tmp_path, tokenizer=TOKENIZER) as one, engine(one.url, vocab_size=size):
                pass


async def test_recorded_answers_of_several_servers_come_to_their_rows():
    def replay(value: float, tokens: tuple[int, ...], num_loads: int) -> list[float]:
        return [value - 0.01 * t for t in range(1, len(tokens))]

    samples = make_rows("s12=|12", "s321=|1234")
    batch = collate_samples(samples)
    models = [ScriptedModel(lambda *_: (5, -1.0), score=partial(replay, value)) for value in (-1.0, -2.0)]
    async with trio.open_nursery() as nursery:
        async with FakeVLLMServer(models[0]) as left, FakeVLLMServer(models[1]) as right:
            async with VLLMEngine(left.url) as one, VLLMEngine(right.url) as two:
                found = (await EngineTeacher(engines=(one, two)).fill(batch, samples, LOG_PROBS, max_tokens=9)).teacher_log_probs
        nursery.cancel_scope.cancel()
    assert found is not None
    assert found[0, 4:6].tolist() == pytest.approx([-1.04, -1.05])
    assert found[1, 5:9].tolist() == pytest.approx([-2.05, -2.06, -2.07, -2.08])
    assert not found[0, :4].any() and not found[1, :5].any()


async def test_each_row_has_the_teacher_that_its_field_names():
    samples = make_rows("s12=|12", "s321=|1234", "s5=|5")
    batch = collate_samples(samples)
    parts = {
        name: ModelTeacher(backend=create_reference_backend(create_model(seed=seed), num_tops=4)) for name, seed in (("a", 1), ("b", 2))
    }
    teacher = TeacherByColumn(column="kind", teachers=parts)
    found = await teacher.fill(batch, samples, {"teacher_log_probs", "teacher_tops"}, max_tokens=100)
    assert found.teacher_log_probs is not None and found.teacher_ids is not None and found.teacher_tops is not None
    for row, sample in enumerate(samples):
        own = create_model(seed=1 + row % 2)
        n = len(sample.tokens)
        torch.testing.assert_close(found.teacher_log_probs[row, :n], score(own, sample.tokens), atol=1e-5, rtol=1e-4)
        with torch.no_grad():
            best = own(torch.tensor([sample.tokens])).logits[0, :-1].argmax(-1)
        assert torch.equal(found.teacher_ids[row, 1:n, 0].long(), best)
    lost = [*samples[:2], Sample(tokens=samples[2].tokens, loss_mask=samples[2].loss_mask, metadata={"kind": "c"})]
    with pytest.raises(DataError, match=r"kind = 'c', for which there is no teacher: there are a, b"):
        await teacher.fill(collate_samples(lost), lost, LOG_PROBS, max_tokens=100)


async def test_a_context_is_read_before_the_very_tokens_of_the_response():
    samples = make_rows("s12=|12", "s321=|1234", reward_details=RewardDetails(reason="9"))
    batch = collate_samples(samples)
    context = TeacherContext(template="{ground_truth}{feedback}{prompt}", tokenizer=TOKENIZER)
    backend = create_reference_backend(create_model(seed=3))
    found = (await ModelTeacher(backend=backend, context=context).fill(batch, samples, LOG_PROBS, max_tokens=30)).teacher_log_probs
    assert found is not None
    for row, sample in enumerate(samples):
        begin, n = sample.loss_mask.index(1.0), len(sample.tokens)
        longer = tokenize_prompt(TOKENIZER, f"1239{sample.prompt}") + sample.tokens[begin:]
        torch.testing.assert_close(found[row, begin:n], score(create_model(seed=3), longer)[begin - n :], atol=1e-5, rtol=1e-4)
        assert not found[row, :begin].any()


async def test_a_context_leaves_the_sets_that_tokens_were_drawn_from():
    own = make_rows("s12=|12", "s321=|34")
    starts = [sample.loss_mask.index(1.0) for sample in own]
    samples = []
    for sample, begin in zip(own, starts, strict=True):
        sets = [sorted((token, token + 5)) for token in sample.tokens[begin:]]
        drawn = KeptTokens(data=np.array(sets, dtype="<i4").tobytes(), counts=(2,) * len(sets))
        samples.append(replace(sample, kept_tokens=KeptTokens.undrawn(begin) + drawn))
    context = TeacherContext(template="{ground_truth}{prompt}", tokenizer=TOKENIZER)
    teacher = ModelTeacher(backend=create_reference_backend(create_model(seed=3)), context=context)
    found = (await teacher.fill(collate_samples(samples), samples, LOG_PROBS, max_tokens=30)).teacher_log_probs
    assert found is not None
    for row, (sample, begin) in enumerate(zip(samples, starts, strict=True)):
        longer = tokenize_prompt(TOKENIZER, f"123{sample.prompt}") + sample.tokens[begin:]
        with torch.no_grad():
            logits = create_model(seed=3)(torch.tensor([longer])).logits[0, begin - len(sample.tokens) - 1 : -1]
        pairs = torch.tensor([[token, token + 5] for token in sample.tokens[begin:]])
        expected = logits.gather(1, pairs).log_softmax(-1)[:, 0]
        torch.testing.assert_close(found[row, begin : len(sample.tokens)], expected, atol=1e-5, rtol=1e-4)


async def test_a_context_too_long_for_the_model_names_the_sample():
    samples = make_rows("s12=|12")
    context = TeacherContext(template="{prompt}" + "1" * 2000, tokenizer=TOKENIZER)
    teacher = ModelTeacher(backend=create_reference_backend(create_model(seed=3), tokenizer=TOKENIZER), context=context)
    with pytest.raises(DataError, match=r"sample 0 .* has 20\d\d tokens with the teacher's context .* that the teacher's model reads"):
        await teacher.fill(collate_samples(samples), samples, LOG_PROBS, max_tokens=10**4)


def test_no_teachers_at_all_are_refused():
    with pytest.raises(ConfigError, match="there is no teacher for any value of 'kind'"):
        TeacherByColumn(column="kind", teachers={})


def test_a_context_changes_the_last_message_of_the_user():
    sample = Sample(prompt=(Message(role="user", content="a"), Message(role="assistant", content="b"), Message(role="user", content="c")))
    context = TeacherContext(template="{prompt} ({feedback})", tokenizer=TOKENIZER)
    assert [m.content for m in context.describe(sample)] == ["a", "b", "c ()"]  # type: ignore[union-attr]
    for template in ("Answer: {answer}", "{prompt}"):
        with pytest.raises(ConfigError, match="expected a text with"):
            TeacherContext(template=template, tokenizer=TOKENIZER)
    with pytest.raises(DataError, match="has no field 'answer'"):
        TeacherContext(template="{prompt}{answer}", tokenizer=TOKENIZER).describe(make_rows("s1=|1")[0])
    with pytest.raises(DataError, match="has no field 'answer', or it is null"):
        TeacherContext(template="{prompt}{answer}", tokenizer=TOKENIZER).describe(Sample(prompt="s", metadata={"answer": None}))


async def test_a_row_that_is_not_a_prompt_and_its_answer_is_named():
    sample = Sample(prompt="s9=", tokens=(9, 9, 9), loss_mask=(0.0, 1.0, 1.0), index=7)
    teacher = ModelTeacher(backend=FakeBackend(), context=TeacherContext(template="{prompt}!", tokenizer=TOKENIZER))
    with pytest.raises(DataError, match=r"sample 7 .* does not begin with the tokens of its prompt"):
        await teacher.fill(collate_samples([sample]), [sample], LOG_PROBS, max_tokens=9)


def test_an_algorithm_without_its_teacher_is_refused_before_the_first_rollout():
    policy = create_reference_backend(create_model(), tokenizer=TOKENIZER)
    plain = ModelTeacher(backend=create_reference_backend(create_model(), tokenizer=TOKENIZER))
    check_requirements(opd(), None, backend=policy, teacher=plain)
    other = create_reference_backend(create_model(vocab_size=80), tokenizer=create_char_tokenizer(80))
    for algorithm, teacher, message in (
        (opd(), None, "pass teacher="),
        (gkd(), plain, "num_tops=64"),
        (opd(), ModelTeacher(backend=other), "the teacher's tokenizer differs from the policy's: .* tokens, the policy's has"),
        (opd(), TeacherByColumn(column="x", teachers={"q": ModelTeacher(backend=other)}), "the teacher of q's tokenizer differs"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_requirements(algorithm, None, backend=policy, teacher=teacher)
