"""The table of docs/models.md, line by line, as tools/docs/generate_models.py compares families with transformers."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from parts import mark_parts

from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess import slots
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.native import NativeModel, open_slots
from rollouts.engines.inprocess.slots import attend_slots
from rollouts.errors import ConfigError, DataError, EngineRequestError
from rollouts.models import loading
from rollouts.models.forward.output_layers import get_output_layer
from rollouts.models.forward.outputs import OutputOptions, compute_log_probs
from rollouts.models.loading import load_hf_model
from rollouts.models.prepare import check_output_layer, prepare_attention, prepare_model
from rollouts.types import Sample, SamplingParams

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\| (\w[\w-]*) \| (\S.*?) \| (\S.*?) \| (\S+) \| (\S+) \| (\S+) \|")
ROUNDING_RATIO = 2  # largest rounding of an engine above the bar, relative to that of transformers' own pass in float32


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_models", ROOT / "tools" / "docs" / "generate_models.py")
    assert spec is not None and spec.loader is not None
    sys.path.append(str(ROOT / "tools" / "docs"))  # of its families
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
TABLE = GENERATOR.PAGE.read_text().split(GENERATOR.BEGIN)[1].split(GENERATOR.END)[0]
WAYS = {match[1]: (match[2], match[3]) for match in LINE.finditer(TABLE)}
ROUNDED = re.findall(r"^\| (\S+) .*\*\*", TABLE, re.MULTILINE)  # engines above the bar
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
    check_engine(family, window, row.engine)


def check_engine(family: str, window: int, worst: float) -> None:
    """Differences beyond the bar must be rounding: as far from float64 as transformers' own pass. Processors differ in it."""
    if worst > GENERATOR.LOG_PROB_BAR:
        rounding = GENERATOR.measure_rounding(family, window)
        assert rounding.engine[0] <= ROUNDING_RATIO * rounding.own[0], rounding
        assert worst <= 3 * rounding.own[1], (worst, rounding)


def test_the_table_has_every_family_of_the_generator():
    assert re.findall(r"^\| (\S+) \|", TABLE, re.MULTILINE) == GENERATOR.FAMILIES
    assert list(WAYS) == GENERATOR.FAMILIES  # none is refused, or left out
    page = GENERATOR.PAGE.read_text()
    rounded = page.split(GENERATOR.ROUNDED_BEGIN)[1].split(GENERATOR.ROUNDED_END)[0]
    assert re.findall(r"^\| (\S+) \|", rounded, re.MULTILINE) == ROUNDED
    refused = page.split(GENERATOR.REFUSED_BEGIN)[1].split(GENERATOR.REFUSED_END)[0]
    assert refused.strip().splitlines() == GENERATOR.format_refused()


def test_every_causal_language_model_of_transformers_has_a_line():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as REGISTERED

    told = {*GENERATOR.FAMILIES, *GENERATOR.REFUSED, *GENERATOR.NOT_OPENED, *GENERATOR.list_same_classes()}
    missing = [name for name in REGISTERED if name not in told]
    assert not missing, (
        f"transformers registers {missing} as causal language models, and docs/models.md has no line for them: add each to FAMILIES or "
        "REFUSED of tools/docs/model_families.py, with settings of a tiny model if it needs some, and run tools/docs/generate_models.py"
    )


@pytest.mark.parametrize("family", GENERATOR.REFUSED)
def test_a_family_that_is_not_computed_is_refused_in_one_sentence(family: str):
    assert GENERATOR.compare_family(family).problem.startswith("refused: ")


@pytest.mark.parametrize("kind", ["musicgen", "musicgen_melody"])
def test_a_model_that_transformers_cannot_open_is_refused_by_its_directory(kind: str, tmp_path: Path):
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        load_hf_model(tmp_path)


def test_block_sparse_attention_of_big_bird_is_refused_although_short_rows_hide_it(monkeypatch: pytest.MonkeyPatch):
    settings = GENERATOR.OWN["big_bird"] | {"attention_type": "block_sparse", "block_size": 64}  # sparse from 705 tokens on
    monkeypatch.setitem(GENERATOR.OWN, "big_bird", settings)
    for use in (prepare_attention, partial(open_slots, max_slots=2, name="engine")):
        model = GENERATOR.create_model("big_bird")  # its pass over a short row leaves full attention behind
        model.bert.set_attention_type("block_sparse")
        with pytest.raises(ConfigError, match="'original_full'"):
            use(model)


@pytest.mark.parametrize("window", [8, 64])
async def test_xlstm_decodes_in_bfloat16_in_rows_of_several_chunks(window: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(GENERATOR.OWN, "xlstm", {"num_blocks": 2, "num_heads": 4, "chunk_size": window})
    model = GENERATOR.create_model("xlstm", window)
    rows = [row[: 3 * window + 20] for row in GENERATOR.draw_rows(window)[:2]]
    exact = copy.deepcopy(model)
    decoding, difference = await GENERATOR.compare_engine(exact, model.bfloat16(), rows)
    assert decoding == "no caches"  # those of transformers have another shape than its recurrence where keys are narrower than values
    assert model.backbone.blocks[0].mlstm_layer.mlstm_backend._inference_fn.func is loading._compute_widened  # pyright: ignore
    assert difference < 0.1  # of weights rounded to bfloat16


def test_the_recurrence_of_xlstm_is_that_of_transformers_where_transformers_computes_it():
    model = GENERATOR.create_model("xlstm")
    tokens = torch.tensor([GENERATOR.draw_rows(8)[0]])
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        loading.mend_own_code(model)
        loading.mend_own_code(model)
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
        rounded = copy.deepcopy(model).bfloat16()(input_ids=tokens, use_cache=False).logits  # fails in transformers
    assert float((rounded - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_a_model_that_names_the_layer_of_its_tied_embeddings_is_sharded():
    model = GENERATOR.create_model("roberta")
    tokens = GENERATOR.draw_rows(8)[1]
    sample = Sample(tokens=tuple(tokens), loss_mask=(0, *[1] * (len(tokens) - 1)), index=0, group_index=0, reward=0.0)
    expected = GENERATOR.read_log_probs(model, torch.tensor(tokens)).detach()
    backend = create_fsdp_backend(copy.deepcopy(model), lr=1e-3)
    found = backend.forward(collate_samples([sample]), lambda outputs: outputs.log_probs).value[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_mixes_float32_with_bfloat16_is_refused_with_what_to_do():
    model = GENERATOR.create_model("inkling2_text").bfloat16()  # its routers are compared in float32
    with pytest.raises(ConfigError, match=r"all weights in bfloat16 \(.*\): .*--engine.dtype float32"):
        open_slots(model, max_slots=2, name="engine")
    for family in ("dbrx", "xmod"):
        options = OutputOptions(compute_dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match=r"bfloat16: take --backend\.compute-dtype float32"):
            prepare_model(GENERATOR.create_model(family), None, torch.device("cpu"), compute_log_probs, options)


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
        assert getattr(decoding, "uses_cache", True), seed
        options = OutputOptions(compute_dtype=torch.bfloat16)
        prepare_model(GENERATOR.create_model(family, seed=seed), None, torch.device("cpu"), compute_log_probs, options)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_a_model_whose_hidden_states_stay_float32_decodes_in_bfloat16_with_its_caches(family: str):
    model = GENERATOR.create_model(family).bfloat16()
    engine = InProcessEngine(copy.deepcopy(model), eos_token_ids=())
    assert engine._slots.uses_cache  # pyright: ignore
    decoding, difference = trio.run(GENERATOR.compare_engine, model, copy.deepcopy(model), GENERATOR.draw_rows(8)[:2])
    assert decoding == "native caches"
    assert difference < 0.1


@pytest.mark.parametrize(("family", "seeds"), [("phimoe", range(2)), ("hunyuan_v1_moe", range(7, 9))])
def test_a_mixture_of_experts_in_bfloat16_is_not_refused_for_its_rounding(family: str, seeds: range, monkeypatch: pytest.MonkeyPatch):
    check_rounded(family, seeds, monkeypatch)


@pytest.mark.parametrize("family", mark_parts(ROUNDED_EXPERTS, every=3))
def test_a_mixture_of_experts_in_bfloat16_takes_its_way_whatever_the_seed(family: str, monkeypatch: pytest.MonkeyPatch):
    check_rounded(family, range(8), monkeypatch)


@pytest.mark.parametrize("family", ["qwen3_moe", "hunyuan_v1_moe", "jetmoe"])
def test_a_wrong_attention_in_bfloat16_is_found_beside_replayed_experts(family: str, monkeypatch: pytest.MonkeyPatch):
    def forget_the_first(*call: Any, step: Any) -> torch.Tensor:
        return attend_slots(*call, step=replace(step, mask=step.mask & (torch.arange(step.mask.shape[-1]) > 0)))

    monkeypatch.setattr(slots, "attend_slots", forget_the_first)
    for seed in range(3):
        assert isinstance(open_rounded(family, seed, monkeypatch), NativeModel), seed


@pytest.mark.parametrize("family", mark_parts(WAYS, every=4))
def test_a_line_of_the_table_holds(family: str):
    check(family, GENERATOR.WINDOW)


@pytest.mark.parametrize("family", mark_parts(OTHER_WINDOWS, every=2))
def test_a_family_is_right_at_another_window(family: str):
    check(family, OTHER_WINDOWS[family])


HELD_OUT = [
    "ministral3", "starcoder2", "phi3", "exaone4", "gemma3n_text", "smollm3", "mixtral", "cwm", "afmoe", "minimax_m2", "granite_swa",
    "mimo_v2_flash", "lfm2", "zamba2", "laguna", "modernbert-decoder",
]  # fmt: skip


@pytest.mark.parametrize(("family", "window"), mark_parts(product(HELD_OUT, (8, 24, 40)), every=4))  # 4: the windows take turns
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
    check_engine(family, window, trio.run(GENERATOR.compare_engine, models[0], models[2], rows)[1])
    rounded = models[0].bfloat16()
    assert trio.run(GENERATOR.compare_engine, rounded, copy.deepcopy(rounded), rows)[1] <= 0.15


def test_few_index_heads_whose_scores_are_tied_are_said(caplog: pytest.LogCaptureFixture):
    for heads, said in ((2, True), (16, False)):
        caplog.clear()
        settings = GENERATOR.OWN["deepseek_v32"] | {"index_n_heads": heads, "num_hidden_layers": 2, "index_topk": 2048}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(GENERATOR.OWN, "deepseek_v32", settings)
            model = GENERATOR.create_model("deepseek_v32")
        for use in (prepare_attention, partial(open_slots, max_slots=2, name="engine")):
            caplog.clear()
            use(copy.deepcopy(model))
            assert ("index_n_heads = 2: scores of exactly 0, about one in 4" in caplog.text) is said


def test_rounding_of_native_caches_is_told_from_a_wrong_result(monkeypatch: pytest.MonkeyPatch):
    check, dtypes = NativeModel._check, list[torch.dtype]()  # pyright: ignore[reportPrivateUsage]

    def check_beyond_the_limit(decoding: NativeModel) -> None:
        dtypes.append(next(decoding.model.parameters()).dtype)
        if dtypes[-1] == torch.bfloat16:  # its rounding is beyond 5 % on some processors only
            raise ConfigError("the rounding of bfloat16")
        check(decoding)

    monkeypatch.setattr(NativeModel, "_check", check_beyond_the_limit)
    model = GENERATOR.create_model("gemma3n_text", seed=3).bfloat16()
    assert NativeModel(model, name="engine").uses_cache
    assert dtypes == [torch.bfloat16, torch.float32]
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
    assert not NativeModel(model, name="engine").uses_cache  # pyright: ignore[reportPrivateUsage]
