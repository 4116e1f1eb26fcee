"""Features are what a class declares: nothing is found out from its methods, and what it declares it has."""

from __future__ import annotations

from typing import Any

import pytest

from integration.simulate.engine import SimulatedFleet
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.functional.backend import TorchFuncTrainingBackend
from rollouts.backends.futures import Pipeline
from rollouts.backends.jax.backend import JAXTrainingBackend
from rollouts.backends.lora.reference import LoRAReference
from rollouts.backends.protocol import (
    BackendFeature,
    count_shards,
    find_limits,
    find_outputs,
    find_token_spec,
    get_backend_features,
    require_backend_feature,
)
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.backends.ranks.leading import LeadingBackend
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.inprocess.engine import _FEATURES as IN_PROCESS
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.protocol import EngineFeature, get_engine_features, require_engine_feature
from rollouts.engines.sglang.engine import _FEATURES as SGLANG
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import _FEATURES as VLLM
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError
from rollouts.testing import FakeBackend, FakeEngine

ENGINES = (InProcessEngine, SGLangEngine, VLLMEngine, EngineFleet, FakeEngine, SimulatedFleet)
BACKENDS = (
    PyTorchTrainingBackend, FSDPTrainingBackend, TorchFuncTrainingBackend, JAXTrainingBackend, LeadingBackend, Pipeline, LoRAReference,
    FakeBackend,
)  # fmt: skip


class Everything:
    """Has the methods of all features and declares none of them."""

    def __getattr__(self, name: str) -> Any:
        if name == "features":
            raise AttributeError(name)
        return lambda: None


@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.__name__)
def test_each_engine_has_the_methods_of_the_features_that_it_declares(kind: type):
    declared = kind.__dict__["features"]
    if isinstance(declared, frozenset):
        assert declared and get_engine_features(kind) == declared
    else:  # of a fleet: those of its members, so it may have any of them, but for being distrusted as one
        can = frozenset(EngineFeature) - {EngineFeature.DISTRUST}
        always = {InProcessEngine: IN_PROCESS, SGLangEngine: SGLANG, VLLMEngine: VLLM}
        if kind in always:  # records experts if asked to
            can = always[kind] | {EngineFeature.ROUTED_EXPERTS}

        class Full(kind):
            features = can

        assert get_engine_features(Full) == Full.features


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.__name__)
def test_each_backend_has_the_methods_of_the_features_that_it_can_have(kind: type):
    can = {BackendFeature.OUTPUTS, BackendFeature.TOKENS} if kind is LoRAReference else set(BackendFeature)
    if kind is PyTorchTrainingBackend:
        can -= {BackendFeature.SHARDS}
    if kind in (FSDPTrainingBackend, LeadingBackend):
        can -= {BackendFeature.WEIGHT_VIEWS}
    declared = kind.__dict__["features"]

    class Full(kind):
        features = declared if isinstance(declared, frozenset) else frozenset(can)

    assert get_backend_features(Full) == Full.features != frozenset()


def test_an_object_that_declares_nothing_has_no_feature_whatever_its_methods():
    assert get_engine_features(Everything()) == get_backend_features(Everything()) == frozenset()
    assert count_shards(Everything()) == 1
    assert find_outputs(Everything()) is find_token_spec(Everything()) is find_limits(Everything()) is None
    expected = (
        r"Everything lacks the feature scores \(recompute_output_log_probs\), which a test needs; it declares none \(a class with "
        r"recompute_output_log_probs does so by `features = frozenset\(\{EngineFeature\.SCORES\}\)`\)\. Do without"
    )
    with pytest.raises(ConfigError, match=expected):
        require_engine_feature(Everything, EngineFeature.SCORES, "a test", instead="Do without.", name="Everything")


def test_a_feature_that_is_missing_is_named_with_those_that_are_there():
    with pytest.raises(
        ConfigError, match=r"^engine lacks the feature groups \(generate_group\), which a test needs; it has memory_updates\.$"
    ):
        require_engine_feature(FakeEngine(), EngineFeature.GROUPS, "a test")
    with pytest.raises(
        ConfigError, match=r"^backend lacks the feature adapters \(forward_base\), which a test needs; it has checkpoints\.$"
    ):
        require_backend_feature(FakeBackend(), BackendFeature.ADAPTERS, "a test")


def test_a_declared_feature_gives_its_methods():
    class Scorer:
        features = frozenset({EngineFeature.SCORES})

        def recompute_output_log_probs(self) -> None: ...

    scorer = Scorer()
    assert require_engine_feature(scorer, EngineFeature.SCORES, "a test") is scorer  # pyright: ignore[reportUnnecessaryComparison]


def test_a_declared_feature_without_its_method_is_an_assertion_with_both_names():
    class Boaster:
        features = frozenset({BackendFeature.CHECKPOINTS})

        def save_checkpoint(self) -> None: ...

    with pytest.raises(AssertionError, match="Boaster declares the feature checkpoints, but has no load_checkpoint and no export_weights"):
        get_backend_features(Boaster())
    with pytest.raises(AssertionError, match="Boaster declares the feature checkpoints, expected one of memory_updates, weight_views"):
        get_engine_features(Boaster())


def test_a_property_is_not_evaluated_where_features_are_asked_for():
    class Slow:
        features = frozenset({BackendFeature.TOKENS})

        @property
        def token_spec(self) -> None:
            raise RuntimeError("a vocabulary was read for nothing")

    assert get_backend_features(Slow()) == {BackendFeature.TOKENS}
