"""Plans of weights that travel, as values."""

from __future__ import annotations

import pytest
import torch

from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import BackendFeature, get_backend_features
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.errors import BackendError, ConfigError
from rollouts.testing import FakeBackend, create_tiny_model
from rollouts.weight_specs import WeightSpec, cast_specs, describe_weights, flatten_bucket, plan_weights, unflatten_bucket

WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(3, dtype=torch.bfloat16),
    "c": torch.arange(8.0).reshape(2, 4).T,
    "d": torch.arange(100.0),
    "e": torch.arange(4),
}


def test_a_plan_has_every_weight_once_in_buckets_of_one_dtype_and_at_most_the_size():
    specs = describe_weights(WEIGHTS)
    plan = plan_weights(specs, 60)
    assert [bucket.names for bucket in plan.buckets] == [("b",), ("a", "c"), ("d",), ("e",)]
    assert [bucket.num_bytes for bucket in plan.buckets] == [6, 56, 400, 32]
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2, 3]
    assert sorted(plan.specs, key=str) == sorted(specs, key=str)
    assert plan.num_bytes == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert plan_weights(specs, 60) == plan


def test_a_bucket_comes_out_as_it_went_in():
    for bucket in plan_weights(describe_weights(WEIGHTS), 10_000).buckets:
        data = flatten_bucket(bucket, {name: WEIGHTS[name] for name in bucket.names}, "cpu")
        assert (data.dtype, data.numel()) == (torch.uint8, bucket.num_bytes)
        for name, tensor in unflatten_bucket(bucket, data).items():
            assert tensor.equal(WEIGHTS[name])


def test_weights_may_travel_in_another_precision():
    specs = cast_specs(describe_weights(WEIGHTS), "bfloat16")
    assert {spec.name: spec.dtype for spec in specs} == {**dict.fromkeys("abcd", "bfloat16"), "e": "int64"}
    (bucket, _) = plan_weights(specs, 10_000).buckets
    sent = unflatten_bucket(bucket, flatten_bucket(bucket, {name: WEIGHTS[name] for name in bucket.names}, "cpu"))
    assert sent["a"].equal(WEIGHTS["a"].bfloat16())


@pytest.mark.parametrize(
    ("came", "words"),
    [
        ({"a": torch.zeros(2, 3)}, "no c"),
        ({"a": torch.zeros(2, 3), "c": torch.zeros(4, 2), "x": torch.zeros(1)}, "unplanned x"),
        ({"a": torch.zeros(3, 2), "c": torch.zeros(4, 2)}, "planned"),
        ({"a": torch.zeros(2, 3, dtype=torch.int32), "c": torch.zeros(4, 2)}, "torch.int32"),
    ],
)
def test_what_was_not_planned_is_not_sent(came, words):
    bucket = plan_weights(describe_weights({name: WEIGHTS[name] for name in "ac"}), 100).buckets[0]
    with pytest.raises(BackendError, match=words):
        flatten_bucket(bucket, came, "cpu")


def test_numbers_that_are_no_longer_whole_are_not_sent_as_if_they_were():
    bucket = plan_weights(describe_weights({"e": WEIGHTS["e"]}), 100).buckets[0]
    with pytest.raises(BackendError, match=r"e is torch\.float32, planned int64"):
        flatten_bucket(bucket, {"e": WEIGHTS["e"].float()}, "cpu")


def test_the_bytes_of_a_spec_are_those_of_its_tensor():
    for spec, tensor in zip(describe_weights(WEIGHTS), WEIGHTS.values(), strict=True):
        assert spec.num_bytes == tensor.nbytes
    assert str(WeightSpec("a", "float32", (2, 3))) == "a float32 [2, 3]"


async def test_a_backend_hands_its_weights_over_a_few_at_a_time_beside_the_event_loop():
    model = create_tiny_model()
    backend = PyTorchTrainingBackend(model, torch.optim.AdamW(model.parameters()))
    whole = await backend.get_weights().result()
    async with open_pipeline(backend) as pipeline:
        assert BackendFeature.WEIGHT_STREAM in get_backend_features(pipeline)
        specs = await pipeline.describe_weights().result()
        assert set(describe_weights(whole)) - set(specs) == {WeightSpec("lm_head.weight", "float32", (64, 32))}, "tied weights travel once"
        for bucket in plan_weights(specs, 10_000).buckets:
            came = await pipeline.gather_weights(bucket.names).result()
            assert tuple(came) == bucket.names
            assert all(came[name].equal(whole[name]) for name in came)
    came["model.norm.weight"].zero_()
    assert model.state_dict()["model.norm.weight"].ne(0).all(), "a transfer must not share memory with the model"


async def test_a_pipeline_promises_no_more_than_its_backend():
    async with open_pipeline(FakeBackend()) as pipeline:
        assert get_backend_features(pipeline) == {BackendFeature.CHECKPOINTS}
        with pytest.raises(ConfigError, match=r"lacks the feature weight_stream .* Pipeline\.describe_weights needs; it has checkpoints"):
            pipeline.describe_weights()
