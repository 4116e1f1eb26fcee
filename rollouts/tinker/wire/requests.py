"""Requests of the client that are JSON, read field by field; what is not supported is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from rollouts.config import LEAST_TEMPERATURE
from rollouts.gateway.dialects.fields import MAX_TOKENS, Fields, refuse, refuse_unsupported
from rollouts.types import SamplingParams

_MOST_SAMPLES = 4096
_NO_SCORES = "prompt_logprobs is all that this server tells of other tokens than the sampled ones"
_SAMPLE_FIELDS: Mapping[str, str | None] = MappingProxyType({
    "type": None, "num_samples": None, "prompt": None, "sampling_params": None, "sampling_session_id": None, "seq_id": None,
    "prompt_logprobs": None, "prompt_logprobs_last_n": None,
    "base_model": "sample by a sampling client", "model_path": "sample by a sampling client",
    "topk_prompt_logprobs": _NO_SCORES, "topk_sample_logprobs": _NO_SCORES, "target_prompt_logprobs": _NO_SCORES,
    "prompt_alt_tokens_k": _NO_SCORES,
    "record_stability_info": "it is for the loss stable_reinforce, which this server does not have; with importance_sampling, ppo or cispo "
    "leave it out",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AdapterWish:
    """Adapters as a client asks for them."""

    rank: int
    seed: int | None = None  # None = the server's
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Numbers of one update."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # norm that a larger gradient is scaled down to; 0 = no clipping


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A request for samples of one prompt."""

    sampler_id: str
    seq_id: int
    prompt: tuple[int, ...]
    num_samples: int
    params: SamplingParams  # without a seed if the request has none
    num_scored: int | None  # tokens at the end of the prompt whose log-probs are asked for; None = they are not


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request for a model to train."""

    session_id: str
    model_seq_id: int
    base_model: str | None
    wish: AdapterWish | None  # None = train all weights
    user_metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_sample_request(body: Fields) -> SampleRequest:
    """Read a request for samples. Raises Refusal (400)."""
    body.check_known(_SAMPLE_FIELDS)
    prompt = _read_prompt(body.read_object("prompt"))
    last = body.read_int("prompt_logprobs_last_n", least=1, most=max(1, len(prompt) - 1))
    scored = len(prompt) - 1 if last is None else min(last, len(prompt) - 1)  # a prompt of one token has none
    return SampleRequest(
        sampler_id=body.need_text("sampling_session_id", "the id of a sampling session"),
        seq_id=_need_int(body, "seq_id"),
        prompt=prompt,
        num_samples=body.read_int("num_samples", 1, least=1, most=_MOST_SAMPLES) or 1,
        params=_read_params(body.read_object("sampling_params")),
        num_scored=scored if body.read_flag("prompt_logprobs") else None,
    )


def read_model_request(body: Fields) -> ModelRequest:
    """Read a request for a model. Raises Refusal (400)."""
    check_optimizer(body)
    wish = None
    if body.get("lora_config") is not None:
        lora = body.read_object("lora_config")
        lora.check_known(dict.fromkeys(("rank", "seed", "train_unembed", "train_mlp", "train_attn")))
        wish = AdapterWish(
            rank=lora.read_int("rank", 32, least=1, most=65_536) or 32,
            seed=lora.read_int("seed"),
            train_attn=lora.read_flag("train_attn", default=True),
            train_mlp=lora.read_flag("train_mlp", default=True),
        )
    return ModelRequest(
        session_id=body.need_text("session_id"),
        model_seq_id=_need_int(body, "model_seq_id"),
        base_model=body.read_text("base_model"),
        wish=wish,
        user_metadata=body.read_object("user_metadata").values,
    )


def check_optimizer(body: Fields) -> None:
    """Refuse another optimizer than AdamW."""
    kind = body.read_object("optimizer_config").get("type")
    if kind not in (None, "adamw"):
        raise refuse_unsupported("optimizer_config.type", kind, "this server has adamw")


def read_adam_params(body: Fields) -> AdamParams:
    """Read the numbers of an update. Raises Refusal (400)."""
    if body.get("adam_params") is None:
        kind = body.read_object("optimizer_params").get("type")
        raise refuse_unsupported("optimizer_params.type", kind, "this server has adamw, with adam_params")
    given = body.read_object("adam_params")
    given.check_known(dict.fromkeys(f.name for f in fields(AdamParams)))
    read: dict[str, float] = {}
    for one in fields(AdamParams):
        most = 1 if one.name.startswith("beta") else 1e9
        value = given.read_number(one.name, least=0, most=most)
        if value is not None:
            if one.name.startswith("beta") and value == 1:
                raise given.refuse(one.name, "a number from 0 to below 1")
            read[one.name] = value
    return AdamParams(**read)


def read_seq_id(body: Fields) -> int:
    """Return the number of a request among those of its model. Raises Refusal (400)."""
    return _need_int(body, "seq_id")


def _need_int(body: Fields, name: str) -> int:
    value = body.read_int(name)
    if value is None:
        raise body.refuse(name, "an integer, at least 0")
    return value


def _read_prompt(prompt: Fields) -> tuple[int, ...]:
    tokens: list[int] = []
    for chunk in prompt.read_objects("chunks", "a list of pieces of the prompt", "an object with a type"):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise chunk.refuse_unsupported("type", "this server takes tokens alone (encoded_text)")
        tokens += chunk.read_list("tokens", "a list of token ids", _read_token)
    if not tokens:
        raise prompt.refuse("chunks", "at least one token")
    return tuple(tokens)


def _read_token(value: Any, place: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise refuse(place, value, "a token id")
    return value


def _read_params(given: Fields) -> SamplingParams:
    given.check_known(dict.fromkeys(("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")))
    stop: Any = given.get("stop")
    strings, ids = tuple[str, ...](), tuple[int, ...]()
    if isinstance(stop, list) and stop and all(type(one) is int for one in stop):  # pyright: ignore[reportUnknownVariableType]
        ids = given.read_list("stop", "token ids", _read_token)
    elif stop == []:
        raise given.refuse_unsupported("stop", "generation always ends at the end of text; null ends it there alone")
    else:
        strings = given.read_stop("stop")
    temperature = given.read_number("temperature", least=0, most=1e6)
    temperature = 1.0 if temperature is None else temperature
    if 0 < temperature < LEAST_TEMPERATURE:
        raise given.refuse("temperature", f"0, or a number from {LEAST_TEMPERATURE:g} to 1e+06")
    top_k = given.read_int("top_k", -1, least=-1, most=MAX_TOKENS) or 0
    top_p = given.read_number("top_p", least=0, most=1, above=True)
    cuts: dict[str, Any] = {} if temperature == 0 else {"top_k": max(top_k, 0), "top_p": 1.0 if top_p is None else top_p}
    return SamplingParams(
        max_tokens=given.read_int("max_tokens", MAX_TOKENS, least=1, most=MAX_TOKENS) or MAX_TOKENS,
        temperature=temperature,
        stop=strings,
        stop_token_ids=ids,
        seed=given.read_int("seed"),
        **cuts,
    )
