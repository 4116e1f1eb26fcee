"""Compare text families of transformers, as tiny random models, with transformers' own forward pass, and write the table of docs/models.md.

python tools/docs/generate_models.py           writes the table, about four minutes
python tools/docs/generate_models.py qwen3     prints the rows of some families
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.native import NativeModel
from rollouts.errors import RolloutsError
from rollouts.models.prepare import prepare_attention
from rollouts.types import LossOutput, Sample, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families begin -->", "<!-- families end -->"
WINDOW = 8
LOG_PROB_BAR, GRADIENT_BAR = 1e-5, 1e-4  # largest differences in float32: nats; relative to the largest entry of a gradient

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
OTHERS = {"mamba_chunk_size": 8, "linear_conv_kernel_dim": 4}
OWN = {  # settings under names of a family's own, or that it needs besides
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64},
    "bloom": {"n_head": 4, "n_layer": 2},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 8},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {"alibi": False},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_expand": 2},
    "zamba2": {"num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "deepseek_v32": {"num_key_value_heads": 4},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 5,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "num_hidden_layers": 6},
    "longcat_flash": {
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "num_layers": 2,
    },
    "llama4_text": {"intermediate_size_mlp": 96},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 8},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "modernbert-decoder": {"local_attention": 8},
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "electra": {"is_decoder": True, "embedding_size": 48},
    "inkling2_text": {"unpadded_vocab_size": 96},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64},
    "openai-gpt": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64, "rotary_dim": 8},
    "xglm": {"d_model": 64, "attention_heads": 4, "num_layers": 4, "ffn_dim": 96},
    "roformer": {"is_decoder": True},
    "ctrl": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64, "dff": 96},
}
FAMILIES = """
llama mistral ministral ministral3 qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text mixtral gemma gemma2
gemma3_text gemma3n_text gemma4_text phi phi3 phimoe olmo olmo2 olmo3 olmoe olmo_hybrid gpt2 gpt_neox gpt_oss gptj mpt deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa smollm3 granite granitemoe granitemoehybrid cohere
cohere2 starcoder2 opt bloom falcon stablelm ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe minimax minimax_m2 lfm2
lfm2_moe exaone4 seed_oss dots1 flex_olmo longcat_flash mamba mamba2 bamba jamba falcon_h1 nemotron_h nemotron arcee apertus vaultgemma
llama4_text helium zamba2 recurrent_gemma afmoe solar_open youtu bitnet diffllama doge jetmoe cwm mimo_v2_flash hy_v3 hy_v4 persimmon
nanochat jais2 exaone_moe minicpm3 hyperclovax laguna mellum bailing_hybrid kolibri1 flint falcon_mamba axk1 cohere2_moe granite_swa
granitemoe_swa granitemoeshared iquestcoder lfm3 minimax_m3_vl_text hrm_text inkling_text gpt_neox_japanese biogpt modernbert-decoder
bert roberta electra dory exaone internlm3 lara_mini beam aria_text apertus1p5_text inkling2_text gpt_neo gpt_bigcode openai-gpt ctrl
codegen xglm roformer sarvam_moe sarvam_mla
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    family: str
    training: str = ""  # way through attention
    decoding: str = ""
    log_probs: float = 0.0  # largest difference of the trainer's log-probs to transformers', nats
    gradients: float = 0.0  # largest difference of a gradient, relative to the largest entry of that parameter's
    engine: float = 0.0  # largest difference of the engine's log-probs to transformers', nats
    problem: str = ""  # why the family is refused or cannot be built

    def format(self) -> str:
        """Return the line."""
        if self.problem:
            return f"| {self.family} | {self.problem} | | | | |"
        pairs = ((self.log_probs, LOG_PROB_BAR), (self.gradients, GRADIENT_BAR), (self.engine, LOG_PROB_BAR))
        figures = " | ".join(f"{value:.0e}" if value <= bar else f"**{value:.0e}**" for value, bar in pairs)
        return f"| {self.family} | {self.training} | {self.decoding} | {figures} |"


def create_model(family: str, window: int = WINDOW, seed: int = 0) -> Any:
    """Create a tiny random causal language model. Raises ValueError if transformers has none of this family of these sizes.

    Args:
        window: sliding window, or size of chunks, of the layers that have one, in tokens.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if family not in CONFIG_MAPPING:
        raise ValueError("not in this version of transformers")
    kind = CONFIG_MAPPING[family]
    names = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", ())}
    wanted = {**SIZES, **EXPERTS, **LATENT, **MAMBA, **LINEAR, **OTHERS, "sliding_window": window, "attention_chunk_size": window}
    wanted["max_position_embeddings"] = max(64, 8 * window)
    problem: Exception | None = None
    for left_out in ((), ("head_dim",), tuple(LATENT)):
        chosen = {name: value for name, value in wanted.items() if name in names and name not in left_out}
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model: Any = AutoModelForCausalLM.from_config(kind(**{**chosen, **OWN.get(family, {})})).float().eval()
                for name, parameter in model.named_parameters():
                    if "proj" in name or "attn" in name:  # so that attention is not next to uniform
                        parameter.data *= 3
            with torch.no_grad():
                model(input_ids=torch.tensor([draw_rows(window)[0]]), use_cache=False)
            return model
        except Exception as error:  # whatever a configuration raises
            problem = error
    print(f"{family}: {type(problem).__name__}: {problem}", file=sys.stderr)
    raise ValueError("not compared: no tiny configuration was found")


def read_log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return transformers' log-probs of one row [n] of tokens. # [n], 0 at the first"""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def find_worst(worst: float, differences: torch.Tensor) -> float:
    """Return the larger one of a number and the largest difference; infinity if one is no number."""
    found = float(differences.abs().max())
    return max(worst, found) if math.isfinite(found) else math.inf


def draw_rows(window: int) -> list[list[int]]:
    """Draw ragged rows of random tokens, two of them longer than four windows."""
    generator = torch.Generator().manual_seed(0)
    lengths = (4 * window + 1, 5, 4 * window + 1, 3 * window, window + 3)
    return [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def compare_training(model: Any, trained: Any, rows: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the largest differences of log-probs and gradients between a backend and the model's own passes over single rows.

    Args:
        model, trained: equal models.
    """
    samples = []
    for i, tokens in enumerate(rows):
        samples.append(Sample(index=i, group_index=i, tokens=tuple(tokens), loss_mask=(0, *[1] * (len(tokens) - 1)), reward=0.0))
    batch = replace(collate_samples(samples), dropout=False)
    weights = torch.linspace(-1, 1, batch.tokens.shape[1])
    backend = create_pytorch_backend(trained, lr=1e-3)
    found = backend.forward(batch, lambda outputs: outputs.log_probs).value
    backend.forward_backward(batch, lambda outputs, batch: LossOutput((outputs.log_probs * weights).sum(), {}))
    worst = 0.0
    for i, length in enumerate(batch.lengths.tolist()):
        row = read_log_probs(model, batch.tokens[i, :length])
        (row * weights[:length]).sum().backward()
        worst = find_worst(worst, row.detach() - found[i, :length])
    pairs = zip(backend.model.parameters(), model.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in pairs if b.grad is not None]
    largest, relative = max(float(b.abs().max()) for _, b in gradients), 0.0
    for a, b in gradients:
        relative = math.inf if a is None else find_worst(relative, (a - b) / (b.abs().max() + 1e-3 * largest))
    model.zero_grad()
    return worst, relative


async def compare_engine(model: Any, served: Any, rows: Sequence[Sequence[int]]) -> tuple[bool, float]:
    """Return whether the embedded engine decodes with the model's own caches, and the largest difference of its log-probs.

    Args:
        model, served: equal models.
    """
    engine = InProcessEngine(served, eos_token_ids=())
    done = []
    longest = max(map(len, rows)) // 3

    async def generate(i: int) -> None:
        params = SamplingParams(max_tokens=longest + 3 * i, seed=i)
        done.append(await engine.generate(rows[i][:longest], params, request_id=f"{i}"))

    async with engine, trio.open_nursery() as nursery:
        for i in range(len(rows)):
            nursery.start_soon(generate, i)
    worst = 0.0
    for completion in done:
        tokens = torch.tensor([*completion.input_tokens, *completion.output_tokens])
        with torch.no_grad():
            expected = read_log_probs(model, tokens)[len(completion.input_tokens) :]
        worst = find_worst(worst, torch.tensor(completion.output_log_probs) - expected)
    return isinstance(engine._slots, NativeModel), worst  # pyright: ignore[reportPrivateUsage]


def compare_family(family: str, window: int = WINDOW) -> Row:
    """Compare one family, in rows beyond four windows."""
    create, rows = partial(create_model, family, window), draw_rows(window)
    try:
        model = create()
    except ValueError as error:
        return Row(family, problem=str(error).splitlines()[0])
    try:
        training = "native rows" if prepare_attention(create()) else "packed"
        log_probs, gradients = compare_training(model, create(), rows)
        native, engine = trio.run(compare_engine, model, create(), rows)
    except RolloutsError as error:
        return Row(family, problem=f"refused: {str(error).splitlines()[0][:160]}")
    return Row(family, training, "native caches" if native else "slots", log_probs, gradients, engine)


def iterate_rows(families: Sequence[str]) -> Iterator[Row]:
    """Compare families one after another, quietly."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for family in families:
        yield compare_family(family)


def main(families: Sequence[str]) -> None:
    """Write the table, or print rows."""
    lines = []
    for row in iterate_rows(families or FAMILIES):
        lines.append(row.format())
        print(lines[-1], flush=True)
    if not families:
        text = PAGE.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))


if __name__ == "__main__":
    main(sys.argv[1:])
