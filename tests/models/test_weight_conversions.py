"""Models whose weights have other names and shapes in files than in memory, as mixtures of experts have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_models import create_expert_model
from parts import mark_parts
from safetensors.torch import load_file, save_file
from test_family_table import GENERATOR, WAYS

from integration.parts.model_settings import settle_weight_sync
from integration.settings.config import Config
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.model import ModelSection
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend, create_fsdp_critic_backend
from rollouts.backends.fsdp.load import load_critic_on_meta, load_hf_model_on_meta, materialize_critic, materialize_from_hf
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.pytorch.files import export_model
from rollouts.backends.weights.export import export_sharded
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import CheckpointError, ConfigError, EngineError
from rollouts.models.heads import create_critic_model, create_reward_model, load_critic_model, load_reward_model
from rollouts.models.weights import converts_weights
from rollouts.testing import create_tiny_model

CREATE = {"pytorch": create_pytorch_backend, "torch_func": create_torch_func_backend, "fsdp": create_fsdp_backend}
CONVERTED = ("qwen3_moe", "gpt_neox", "deepseek_v3")


def change(model, by=1e-3):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)
    return model


def weights_of(model):
    return {name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone() for name, value in model.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not wrong, wrong


def test_only_some_models_are_converted():
    assert [converts_weights(GENERATOR.create_model(family)) for family in (*CONVERTED, "qwen3", "gemma3_text")] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("family", CONVERTED)
@pytest.mark.parametrize("kind", CREATE)
async def test_a_checkpoint_is_restored(tmp_path, kind, family):
    backend, expected = CREATE[kind](change(GENERATOR.create_model(family)), lr=1e-3), change(GENERATOR.create_model(family)).state_dict()
    await backend.save_checkpoint(tmp_path).result()
    other = CREATE[kind](GENERATOR.create_model(family), lr=1e-3)
    await other.load_checkpoint(tmp_path).result()
    assert_same(weights_of(other.model), expected)
    reopened = GENERATOR.create_model(family).from_pretrained(tmp_path)
    assert_same(reopened.state_dict(), expected)


@pytest.mark.parametrize("family", [*CONVERTED, "camembert"])  # CamemBERT's first tied name in memory is not the one in its files
async def test_every_backend_writes_the_files_that_transformers_writes(tmp_path, family):
    model = change(GENERATOR.create_model(family))
    model.save_pretrained(tmp_path / "own")
    expected = load_file(tmp_path / "own" / "model.safetensors")
    for kind, create in CREATE.items():
        backend = create(change(GENERATOR.create_model(family)), lr=1e-3)
        (tmp_path / kind).mkdir()
        await backend.export_weights(tmp_path / kind).result()
        assert_same(load_file(tmp_path / kind / "model.safetensors"), expected)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, target_modules=("query",))], ids=["whole", "adapters"])
def test_exports_of_one_process_and_of_many_have_the_same_names(tmp_path, lora):
    model = GENERATOR.create_model("camembert")
    if lora is not None:
        model = create_pytorch_backend(model, lr=1e-3, lora=lora).model
    for dtype in (None, "bfloat16"):
        export_model(model, None, tmp_path / f"one {dtype}", dtype=dtype)
        (tmp_path / f"many {dtype}").mkdir()
        export_sharded(model, tmp_path / f"many {dtype}", dtype=dtype)
        assert_same(*(load_file(tmp_path / f"{way} {dtype}" / "model.safetensors") for way in ("many", "one")))


@pytest.mark.parametrize("family", CONVERTED)
async def test_an_engine_loads_a_directory(tmp_path, family):
    model = change(GENERATOR.create_model(family))
    model.save_pretrained(tmp_path)
    async with InProcessEngine(GENERATOR.create_model(family), eos_token_ids=()) as engine:
        await engine.update_weights_from_checkpoint(tmp_path)
        assert_same(engine._model.state_dict(), model.state_dict())


async def test_adapters_on_such_a_model_are_restored(tmp_path):
    def create(fill):
        model = create_expert_model("qwen3_moe")
        backend = create_pytorch_backend(model, lr=1e-3, lora=LoRAConfig(rank=2, target_modules=("q_proj",), save_base=True))
        return change(backend.model, fill), backend

    (model, backend), (other, fresh) = create(1e-3), create(0.0)
    await backend.save_checkpoint(tmp_path).result()
    await fresh.load_checkpoint(tmp_path).result()
    assert_same(other.state_dict(), model.state_dict())


def test_weights_of_another_model_are_refused_with_their_names(tmp_path):
    create_expert_model("qwen3_moe").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"does not fit Qwen3MoeForCausalLM: missing \['model.layers.1.self_attn.q_proj.weight'\]"):
        create_pytorch_backend(create_expert_model("qwen3_moe"), lr=1e-3).load_checkpoint(tmp_path)


async def test_an_engine_keeps_its_weights_where_a_directory_is_of_another_model(tmp_path):
    create_tiny_model().save_pretrained(tmp_path)
    async with InProcessEngine(create_expert_model("qwen3_moe"), eos_token_ids=()) as engine:
        before = weights_of(engine._model)
        with pytest.raises(EngineError, match=r"cannot (load|take new) weights"):
            await engine.update_weights_from_checkpoint(tmp_path)
        assert_same(weights_of(engine._model), before)


def test_weights_of_such_a_model_reach_servers_through_the_disk(tmp_path):
    create_expert_model("qwen3_moe").save_pretrained(tmp_path)
    config = Config(model=ModelSection(path=str(tmp_path)), engine=EngineSection(kind="sglang", urls=("http://127.0.0.1:1",)))
    assert settle_weight_sync(config).engine.weight_sync == "disk"
    with pytest.raises(ConfigError, match=r"engine.weight_sync is 'memory', but weights of a model of type 'qwen3_moe' .*: use disk"):
        settle_weight_sync(replace(config, engine=replace(config.engine, weight_sync="memory")))
    create_tiny_model().save_pretrained(tmp_path / "plain")
    plain = replace(config, model=ModelSection(path=str(tmp_path / "plain")))
    assert settle_weight_sync(plain) is plain


async def test_critics_of_such_a_model_and_of_one_without_a_class_in_transformers_are_restored(tmp_path):
    for family in ("qwen3_moe", "gemma2", "afmoe"):
        model, directory = GENERATOR.create_model(family), tmp_path / family
        model.save_pretrained(directory)
        create_char_tokenizer(64).save_pretrained(directory)
        critic = create_critic_backend(directory, lr=1e-3, seed=3)
        sharded = create_fsdp_critic_backend(directory, lr=1e-3, seed=3)
        assert_same(weights_of(sharded.model), critic.model.state_dict())
        (directory / "critic").mkdir()
        change(critic.model)
        await critic.save_checkpoint(directory / "critic").result()
        await sharded.load_checkpoint(directory / "critic").result()
        assert_same(weights_of(sharded.model), critic.model.state_dict())
        assert_same(load_critic_model(directory / "critic").state_dict(), critic.model.state_dict())


_OF_ENCODERS = "whisper bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart".split()
WITHOUT_CRITIC = dict.fromkeys(_OF_ENCODERS, "has a backbone with encoder.*, which this language model has not") | dict.fromkeys(
    ("emu3", "mllama", "trocr"), "transformers has no AutoModelFor(Token|Sequence)Classification for a model of type"
)
"""Families without critics and reward models, with the reason."""
_POOLED = "bert ernie megatron-bert rembert roc_bert".split()
_DEEP = "roberta roformer electra big_bird camembert data2vec-text roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
WITHOUT_SCORER = (
    WITHOUT_CRITIC
    | dict.fromkeys(_POOLED, "has a backbone with pooler.dense.bias, which this language model has not")
    | dict.fromkeys(_DEEP, "has several layers in its head, which this language model has not")
)
"""Families without reward models, with the reason."""
NOT_OPENED_BY_THEMSELVES = ("emu3", "mllama")  # transformers opens these language models as a part of a larger model alone


@pytest.mark.parametrize("family", mark_parts(WAYS, every=4, first=2))
async def test_every_family_can_be_saved_opened_and_given_a_head(tmp_path, family):
    model = GENERATOR.create_model(family)
    backend = create_pytorch_backend(model, lr=1e-3)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    await backend.save_checkpoint(tmp_path).result()
    other = create_pytorch_backend(change(GENERATOR.create_model(family), 1e-4), lr=1e-3)
    await other.load_checkpoint(tmp_path).result()
    assert_same(other.model.state_dict(), expected)
    if family in NOT_OPENED_BY_THEMSELVES:
        with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
            load_hf_model_on_meta(tmp_path)
    else:
        on_meta = load_hf_model_on_meta(tmp_path)
        materialize_from_hf(on_meta, tmp_path, "cpu")
        assert_same(on_meta.state_dict(), expected)
    if family in WITHOUT_SCORER:
        with pytest.raises(ConfigError, match=WITHOUT_SCORER[family]):
            create_reward_model(model)
    else:
        scorer = create_reward_model(model)
        scorer.save_pretrained(tmp_path / "scorer")
        assert_same(load_reward_model(tmp_path / "scorer").state_dict(), scorer.state_dict())
    if family in WITHOUT_CRITIC:
        with pytest.raises(ConfigError, match=WITHOUT_CRITIC[family]):
            create_critic_model(model)
        with pytest.raises((ConfigError, CheckpointError)):
            materialize_critic(load_critic_on_meta(tmp_path), tmp_path, "cpu", seed=0)
        return
    critic = create_critic_model(model)
    critic.save_pretrained(tmp_path / "critic")
    assert_same(load_critic_model(tmp_path / "critic").state_dict(), critic.state_dict())
    sharded = load_critic_on_meta(tmp_path)
    materialize_critic(sharded, tmp_path, "cpu", seed=0)
    assert_same(sharded.state_dict(), load_critic_model(tmp_path, seed=0).state_dict())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("zamba2", r"has decoder layers that share parameters \(.*\), which cannot be sharded one by one: use a backend of one process"),
        ("biogpt", "has no decoder layers that could be sharded one by one"),
        ("mamba", "cannot run rows"),
    ],
)
def test_a_family_that_cannot_be_sharded_is_refused_with_the_reason(family, reason):
    with pytest.raises(ConfigError, match=reason):
        create_fsdp_backend(GENERATOR.create_model(family), lr=1e-3)
