"""The table of docs/models.md, line by line, as tools/docs/generate_models.py compares families with transformers."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess import slots
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.native import NativeModel, open_slots
from rollouts.engines.inprocess.slots import attend_slots
from rollouts.errors import DataError, EngineRequestError
from rollouts.models.forward import OutputOptions, compute_log_probs, get_output_layer
from rollouts.models.prepare import check_output_layer, prepare_attention, prepare_model
from rollouts.types import Sample, SamplingParams

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\| (\w[\w-]*) \| (\S.*?) \| (\S.*?) \| (\S+) \| (\S+) \| (\S+) \|")
ROUNDED = {
    "gemma4_text": 3e-5,
    "youtu": 6e-5,  # transformers' own differs from float64 by 5e-5
    "minicpm3": 3e-5,
    "mamba": 5e-5,
}  # largest difference of an engine whose own float32 differs as much


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_models", ROOT / "tools" / "docs" / "generate_models.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
TABLE = GENERATOR.PAGE.read_text().split(GENERATOR.BEGIN)[1].split(GENERATOR.END)[0]
WAYS = {match[1]: (match[2], match[3]) for match in LINE.finditer(TABLE)}
OTHER_WINDOWS = {
    "gemma3_text": 19,
    "mistral": 3,
    "llama4_text": 16,
    "olmo3": 30,
    "gemma2": 5,
    "cohere2": 12,
    "qwen3_5_text": 70,
    "gpt_oss": 17,
}


def check(family: str, window: int) -> None:
    row = GENERATOR.compare_family(family, window)
    assert not row.problem
    assert (row.training, row.decoding) == WAYS[family]
    assert row.log_probs <= GENERATOR.LOG_PROB_BAR
    assert row.gradients <= GENERATOR.GRADIENT_BAR
    assert row.engine <= ROUNDED.get(family, GENERATOR.LOG_PROB_BAR)


def test_the_table_has_every_family_of_the_generator():
    assert re.findall(r"^\| (\S+) \|", TABLE, re.MULTILINE) == GENERATOR.FAMILIES
    assert list(WAYS) == GENERATOR.FAMILIES  # none is refused, or left out
    assert set(re.findall(r"^\| (\S+) .*\*\*", TABLE, re.MULTILINE)) <= set(ROUNDED)


def test_logits_of_rows_that_pad_the_output_matrix_are_dropped_as_inkling_does():
    model = GENERATOR.create_model("inkling_text")
    model.config.unpadded_vocab_size = 90
    check_output_layer(model)  # compares with the model's own logits
    assert get_output_layer(model).weight.shape[0] == 90
    backend = create_pytorch_backend(model, lr=1e-3)
    sample = Sample(tokens=(3, 4, 91, 5), loss_mask=(0, 1, 1, 1), index=0, group_index=0, reward=0.0)
    with pytest.raises(DataError, match=r"row 0 of 1 of a batch has the token id 91, outside of the model's 90 embeddings"):
        backend.forward(collate_samples([sample]), lambda outputs: outputs.log_probs)


async def test_the_engine_refuses_the_token_ids_that_only_pad_the_output_matrix_as_the_trainer_does():
    model = GENERATOR.create_model("inkling_text")
    model.config.unpadded_vocab_size = 90
    async with InProcessEngine(model, eos_token_ids=()) as engine:
        assert len((await engine.generate([3, 89], SamplingParams(max_tokens=2))).output_tokens) == 2
        with pytest.raises(EngineRequestError, match="90"):
            await engine.generate([3, 90], SamplingParams(max_tokens=2))


def test_soft_caps_of_xlstm_are_applied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(GENERATOR.OWN, "xlstm", {"num_hidden_layers": 1})
    model = GENERATOR.create_model("xlstm")
    with torch.no_grad():
        check_output_layer(model)  # compares with the model's own logits, also large ones
    found = get_output_layer(model).transform
    assert found is not None and found.soft_cap == model.config.output_logit_soft_cap


ROUNDED_EXPERTS = {  # mixtures of experts, and the way of the engine
    "mixtral": "slots", "hunyuan_v1_moe": "slots", "dots1": "slots", "flex_olmo": "slots", "granitemoe": "slots", "qwen3_moe": "slots",
    "deepseek_v3": "slots", "glm4_moe": "slots", "minimax_m2": "slots", "olmoe": "slots", "qwen2_moe": "slots",
    "jetmoe": "slots", "llama4_text": "slots", "phimoe": "native caches", "gpt_oss": "native caches", "qwen3_5_moe_text": "native caches",
}  # fmt: skip


def open_rounded(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open the decoding of a model in bfloat16 with so many experts that rounding changes the choice of some."""
    monkeypatch.setitem(GENERATOR.EXPERTS, "num_experts_per_tok", 4)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        monkeypatch.setitem(GENERATOR.EXPERTS, name, 16)
    model = GENERATOR.create_model(family, seed=seed).bfloat16()
    dtypes = [x.dtype for x in (*model.parameters(), *model.buffers())]
    decoding = open_slots(model, max_slots=4, name="engine")
    assert dtypes == [x.dtype for x in (*model.parameters(), *model.buffers())]
    return decoding


def check_rounded(family: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        decoding = open_rounded(family, seed, monkeypatch)
        assert isinstance(decoding, NativeModel) is (ROUNDED_EXPERTS[family] == "native caches"), seed
        assert getattr(decoding, "_uses_cache", True), seed
        options = OutputOptions(compute_dtype=torch.bfloat16)
        prepare_model(GENERATOR.create_model(family, seed=seed), None, torch.device("cpu"), compute_log_probs, options)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_a_model_whose_hidden_states_stay_float32_decodes_in_bfloat16_with_its_caches(family: str):
    model = GENERATOR.create_model(family).bfloat16()
    engine = InProcessEngine(copy.deepcopy(model), eos_token_ids=())
    assert engine._slots._uses_cache  # pyright: ignore
    native, difference = trio.run(GENERATOR.compare_engine, model, copy.deepcopy(model), GENERATOR.draw_rows(8)[:2])
    assert native
    assert difference < 0.1


@pytest.mark.parametrize(("family", "seeds"), [("phimoe", range(2)), ("hunyuan_v1_moe", range(7, 9))])
def test_a_mixture_of_experts_in_bfloat16_is_not_refused_for_its_rounding(family: str, seeds: range, monkeypatch: pytest.MonkeyPatch):
    check_rounded(family, seeds, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", ROUNDED_EXPERTS)
def test_a_mixture_of_experts_in_bfloat16_takes_its_way_whatever_the_seed(family: str, monkeypatch: pytest.MonkeyPatch):
    check_rounded(family, range(20), monkeypatch)


@pytest.mark.parametrize("family", ["qwen3_moe", "hunyuan_v1_moe", "jetmoe"])
def test_a_wrong_attention_in_bfloat16_is_found_beside_replayed_experts(family: str, monkeypatch: pytest.MonkeyPatch):
    def forget_the_first(*call: Any, step: Any) -> torch.Tensor:
        return attend_slots(*call, step=replace(step, mask=step.mask & (torch.arange(step.mask.shape[-1]) > 0)))

    monkeypatch.setattr(slots, "attend_slots", forget_the_first)
    for seed in range(3):
        assert isinstance(open_rounded(family, seed, monkeypatch), NativeModel), seed


@pytest.mark.slow
@pytest.mark.parametrize("family", WAYS)
def test_a_line_of_the_table_holds(family: str):
    check(family, GENERATOR.WINDOW)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHER_WINDOWS)
def test_a_family_is_right_at_another_window(family: str):
    check(family, OTHER_WINDOWS[family])


HELD_OUT = [
    "ministral3", "starcoder2", "phi3", "exaone4", "gemma3n_text", "smollm3", "mixtral", "cwm", "afmoe", "minimax_m2", "granite_swa",
    "mimo_v2_flash", "lfm2", "zamba2", "laguna", "modernbert-decoder",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("window", [8, 24, 40])
@pytest.mark.parametrize("family", HELD_OUT)
def test_a_held_out_family_is_right_in_rows_of_three_windows(family: str, window: int, monkeypatch: pytest.MonkeyPatch):
    """Families and windows that nothing was adapted to: float32 in trainer and engine, the engine in bfloat16 beside its own pass."""
    if family == "modernbert-decoder":
        monkeypatch.setitem(GENERATOR.OWN, family, {"local_attention": window})
    generator = torch.Generator().manual_seed(window)
    lengths = (3 * window + 1, 7, 3 * window + 1, 2 * window + 5)
    rows = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]
    models = [GENERATOR.create_model(family, window, seed=3) for _ in range(3)]
    log_probs, gradients = GENERATOR.compare_training(models[0], models[1], rows)
    assert log_probs <= GENERATOR.LOG_PROB_BAR
    assert gradients <= GENERATOR.GRADIENT_BAR
    assert trio.run(GENERATOR.compare_engine, models[0], models[2], rows)[1] <= GENERATOR.LOG_PROB_BAR
    rounded = models[0].bfloat16()
    assert trio.run(GENERATOR.compare_engine, rounded, copy.deepcopy(rounded), rows)[1] <= 0.15


def test_few_index_heads_whose_scores_are_tied_are_said(caplog: pytest.LogCaptureFixture):
    for heads, said in ((2, True), (16, False)):
        caplog.clear()
        settings = GENERATOR.OWN["deepseek_v32"] | {"index_n_heads": heads, "num_hidden_layers": 2}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(GENERATOR.OWN, "deepseek_v32", settings)
            model = GENERATOR.create_model("deepseek_v32")
        for use in (prepare_attention, partial(open_slots, max_slots=2, name="engine")):
            caplog.clear()
            use(copy.deepcopy(model))
            assert ("index_n_heads = 2: scores of exactly 0, about one in 4" in caplog.text) is said


def test_rounding_of_native_caches_is_told_from_a_wrong_result():
    model = GENERATOR.create_model("gemma3n_text", seed=3).bfloat16()  # beyond 5% in bfloat16, in decoding over slots and caches
    decoding = open_slots(model, max_slots=4, name="engine")
    assert isinstance(decoding, NativeModel)
    assert decoding._uses_cache  # pyright: ignore[reportPrivateUsage]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("mistake", ["position", "mask"])
def test_a_wrong_native_cache_is_refused_in_bfloat16_although_float32_decides_about_rounding(mistake: str, monkeypatch: pytest.MonkeyPatch):
    model, step = GENERATOR.create_model("gemma3n_text", seed=3).bfloat16(), NativeModel._step  # pyright: ignore[reportPrivateUsage]

    def step_wrongly(decoding: Any, cohort: Any, tokens: torch.Tensor, position: int) -> torch.Tensor:
        if mistake == "mask" and cohort.cache is not None:
            for layer in cohort.cache.layers:
                layer.values[..., -1, :] = 0  # the newest token before this one is not seen
            return step(decoding, cohort, tokens, position)
        decoder = decoding._decoder

        def decode(**call: Any) -> Any:
            return decoder(**call | ({"position_ids": call["position_ids"] - 1} if "position_ids" in call else {}))

        decoding._decoder = decode
        try:
            return step(decoding, cohort, tokens, position)
        finally:
            decoding._decoder = decoder

    monkeypatch.setattr(NativeModel, "_step", step_wrongly)
    assert not NativeModel(model, name="engine")._uses_cache  # pyright: ignore[reportPrivateUsage]
