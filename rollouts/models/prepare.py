"""Prepare a model for rows: find the way through its attention that computes them right, and compare its results.

Packed attention is causal, over the whole row, a sliding window or chunks; a model's own attention is replaced by it. A model that asks for
more (an attention keyword unknown here, another mask than the one computed, layers of another kind) keeps its own attention and runs rows
of one length at a time, which is slower and exact. Only a model that is not causal is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollouts.data.model_limits import ModelLimits, find_context_length, read_limits
from rollouts.errors import ConfigError
from rollouts.models.forward.attention import ATTENTION_NAME, USE_ANOTHER, attend, attend_packed, find_chunk, name_layer
from rollouts.models.forward.output_layers import get_decoder, get_output_layer, get_value_head, read_value_head
from rollouts.models.forward.outputs import ComputeOutputs, OutputOptions, describe_outputs
from rollouts.models.forward.packing import pack_padded
from rollouts.models.forward.passes import run_native, run_packed
from rollouts.models.loading import mend_own_code
from rollouts.models.replay import Choices, compare_replay
from rollouts.models.routers import Routers, find_routers, probe_routers
from rollouts.models.weights import check_finite_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_logger = logging.getLogger(__name__)

PROBE_NAME = "rollouts_probe"
"""Name of attend_probe in transformers' registry: attend, with the masks that the model makes."""

LONGEST_CHECK = 512
"""Widest window, in tokens, that is compared with transformers' own attention on longer rows; for wider ones the masks are read."""

FARTHEST_MASK = 1 << 20
"""Position up to which masks are read if a model has no context length or a longer one."""

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types whose attention is computed here, with the mask that ProbedMasks reads."""

MANY_INDEX_HEADS = 16
"""Index heads of sparse attention from which on scores are hardly ever tied: a score is exactly 0 where the ReLU of every head is."""

_BOUNDS = (  # names in configurations: windows, chunks, blocks and convolutions, in tokens
    "sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention", "attention_chunk_size",
    "index_topk", "indexer_budget", "chunk_size", "mamba_chunk_size", "block_size", "linear_conv_kernel_dim", "conv_L_cache",
    "mamba_d_conv",
)  # fmt: skip

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names in configurations

PACKED_LAYERS = (*ATTENTION_LAYERS, "linear_attention")
"""Layer types that can run packed rows: linear attention where its kernels keep rows apart."""


def prepare_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    compute_outputs: ComputeOutputs,
    options: OutputOptions,
) -> tuple[ModelLimits, OutputOptions]:
    """Prepare an unsharded model for training, in place: move it, find its way through attention, and check it in the dtypes of its passes.

    Returns: limits of its rows; the options with the way that was found.
    Raises: ConfigError for a model that is not causal, lacks the head of compute_outputs, or has not this tokenizer's embeddings.
    """
    dtype = options.compute_dtype
    assert dtype in (torch.float32, torch.bfloat16), f"compute_dtype is {dtype}, expected float32 or bfloat16"
    cast("torch.nn.Module", model).to(device)
    check_master_weights(model, dtype)
    limits = read_limits(model, tokenizer)
    options = replace(options, native_attention=prepare_attention(model))
    if dtype != torch.float32:  # again, in the dtype of the passes
        (check_native_rows if options.native_attention else use_packed_attention)(model, dtype)
    options = replace(options, routers=inspect_routers(model, native=options.native_attention))
    check_head(model, compute_outputs, options, device)
    return limits, replace(options, shares_prompts=can_share_prompts(model, compute_outputs, options, device))


def can_share_prompts(model: PreTrainedModel, compute_outputs: ComputeOutputs, options: OutputOptions, device: torch.device) -> bool:
    """Return whether prompts that rows share may be computed once: on a CPU, by packed attention, for a known head.

    A mixture of experts whose load is measured counts the tokens of every row, linear attention has no keys of a prompt, and chunks of
    attention end in the middle of one.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    is_plain = not options.native_attention and not options.routers.modules
    is_plain = is_plain and not {"linear_attention", "chunked_attention"} & set(layer_types)
    return is_plain and device.type == "cpu" and describe_outputs(compute_outputs) is not None


def recompute_activations(model: PreTrainedModel) -> None:
    """Let a model keep only the input of each layer in a pass that is trained on, and compute the rest again in the backward pass.

    Activations take about the memory of one layer; a step takes about a third more time. The numbers stay the same.

    Raises: ConfigError for a model that does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(f"gradient_checkpointing is set, but {type(model).__name__} does not support it: leave it off")
    # the second is the name before transformers 5.2x
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def inspect_routers(model: PreTrainedModel, *, native: bool) -> Routers:
    """Find the routers of a model that prepare_attention has prepared, by small passes.

    Args:
        native: result of prepare_attention.
    """
    length = find_check_length(model, None, at_least=17)
    tokens = draw_check_tokens(model, (1, length))
    packed = pack_padded(tokens, torch.full((1,), length, device=tokens.device))

    def run() -> Tensor:
        return (run_native if native else run_packed)(model, packed)

    def run_own() -> Any:
        with nullcontext() if native else native_attention(model):
            return cast("Any", model)(input_ids=tokens, output_router_logits=True, use_cache=False)

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            routers = find_routers(model, run, run_own)
            if routers.problem is not None:
                return routers
            return replace(routers, replay_problem=compare_replay(type(model).__name__, routers, run, (1, length)))
    finally:
        model.train(was_training)


@contextmanager
def early_temperatures(model: PreTrainedModel) -> Generator[None]:
    """Let the temperatures of forward.tune_queries change after a few tokens in the block, where real ones change after thousands."""
    layers = [layer for layer in cast("torch.nn.Module", model).modules() if getattr(layer, "attn_temperature_tuning", False)]
    before = [cast("Any", layer).floor_scale for layer in layers]
    try:
        for layer in layers:
            cast("Any", layer).floor_scale = 3
        yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            cast("Any", layer).floor_scale = scale


@contextmanager
def open_choices(model: PreTrainedModel) -> Generator[Choices]:
    """Yield what keeps the experts of a mixture of experts equal in the passes of the block, which compare results in half precision.

    If its experts cannot be chosen from outside, the block computes in float32. A model of another kind, or in float32, is left as it is.

    Args:
        model: in eval mode, with its own attention.
    """
    parameters = cast("torch.nn.Module", model)
    is_rounded = find_dtype(model, torch.empty(0, device=next(parameters.parameters()).device)) != torch.float32
    config: Any = model.config.get_text_config()
    if not is_rounded or not any(isinstance(n := getattr(config, name, None), int) and n > 1 for name in _EXPERT_COUNTS):
        yield Choices(Routers())
        return
    tokens = draw_check_tokens(model, (1, find_check_length(model, None, at_least=17)))

    def run() -> Tensor:
        return cast("Any", get_decoder(model))(input_ids=tokens, use_cache=False).last_hidden_state[0]

    routers = probe_routers(model, run)
    if routers.problem is None and compare_replay(type(model).__name__, routers, run, cast("tuple[int, int]", tuple(tokens.shape))) is None:
        yield Choices(routers)
        return
    with widened(model):
        yield Choices(Routers())


@contextmanager
def widened(model: PreTrainedModel) -> Generator[None]:
    """Compute in float32 in the block, with the weights as they are; afterwards they have their own dtype again."""
    parameters = cast("torch.nn.Module", model)
    tensors = [x for x in (*parameters.parameters(), *parameters.buffers()) if x.is_floating_point()]
    before = [x.data for x in tensors]
    try:
        for x in tensors:
            x.data = x.data.float()
        with torch.autocast(next(parameters.parameters()).device.type, enabled=False):
            yield
    finally:
        for x, data in zip(tensors, before, strict=True):
            x.data = data


def check_master_weights(model: torch.nn.Module, compute_dtype: torch.dtype) -> None:
    """Check the dtypes of parameters: float32 whatever dtype a pass has, or bfloat16 as the passes are.

    Raises: ConfigError for weights in bfloat16 and passes in float32.
    """
    for name, parameter in model.named_parameters():
        assert parameter.dtype in (torch.float32, torch.bfloat16), f"parameter {name} is {parameter.dtype}, expected float32 or bfloat16"
        if parameter.dtype != torch.float32 and compute_dtype == torch.float32:
            raise ConfigError(
                f"parameter {name} is bfloat16, but matrix products are in float32: take compute_dtype bfloat16, or load the weights in "
                "float32"
            )


def check_head(model: PreTrainedModel, compute_outputs: ComputeOutputs, options: OutputOptions, device: torch.device) -> None:
    """Raise ConfigError, before anything is trained, if the model lacks the head that compute_outputs reads."""
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    packed = pack_padded(tokens, torch.full((1,), 2, device=device))
    config: Any = model.config.get_text_config()
    width = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT projects its hidden states to that
    hidden = torch.zeros((2, width), device=device)
    with torch.no_grad():
        compute_outputs(model, hidden, packed, None, options)


class ProbedMasks:
    """Mask functions that a model makes for a pass, compared with causal attention; remembers the proven ones."""

    def __init__(self, config: Any) -> None:
        self._end = min(find_context_length(config) or FARTHEST_MASK, FARTHEST_MASK)
        self._config = config
        self._proven: set[tuple[int, int | None, int | None]] = set()

    def check(self, module: Any, mask: Any, window: int | None) -> None:
        """Raise ConfigError unless a layer's mask is causal, over its window or in its chunks, as far as the model's context goes."""
        chunk = find_chunk(module)
        if mask is None:  # the model leaves masking to the attention function
            if getattr(module, "is_causal", True) is not True:
                raise ConfigError(f"{name_layer(module)} is not causal (is_causal = False). {USE_ANOTHER}")
            if window is not None or chunk is not None:
                bound = f"sliding_window = {window}" if chunk is None else f"attention_chunk_size = {chunk}"
                raise ConfigError(f"{name_layer(module)} has {bound} and no mask for it. {USE_ANOTHER}")
            return
        sees = cast("Callable[..., Any] | None", getattr(mask, "sees", None))
        if sees is None:  # not made by probe_mask
            raise ConfigError(f"{name_layer(module)} changes its attention mask by itself{_quote_fields(self._config)}. {USE_ANOTHER}")
        if (id(mask), window, chunk) in self._proven:
            return
        columns = torch.arange(self._end, device=mask.device)
        zero = columns.new_zeros(())
        edges = {0, self._end - 1, *(1 << i for i in range(21)), *((window - 1, window, window + 1) if window else ())}
        edges |= {k * chunk + i for k in (1, 2, 3) for i in (-1, 0, 1)} if chunk else set()
        for row in sorted(edge for edge in edges if 0 <= edge < self._end):
            expected = (columns <= row) & (columns > row - (window or self._end))
            expected = expected & (columns >= row - row % (chunk or self._end))
            if not torch.broadcast_to(sees(zero, zero, zero + row, columns), columns.shape).equal(expected):
                where = "whole rows" if window is None else f"sliding_window = {window}"
                where = where if chunk is None else f"attention_chunk_size = {chunk}"
                raise ConfigError(
                    f"{name_layer(module)} attends in another way than causally over {where}: the mask that transformers makes is "
                    f"different at position {row}{_quote_fields(self._config)}. {USE_ANOTHER}"
                )
        self._proven.add((id(mask), window, chunk))


def attend_probe(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, masks: ProbedMasks | None = None, **call: Any
) -> tuple[Tensor, None]:
    """attend for a pass of probe_attention, in which models make their masks, too."""
    assert masks is not None, f"a model with attention {PROBE_NAME!r} was called outside of probe_attention"
    masks.check(module, attention_mask, call.get("sliding_window"))
    return attend(module, query, key, value, None, **call)


def probe_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: torch.device, **_: Any) -> Tensor:
    """Mask factory that transformers calls in such a pass; the mask carries the function that tells which positions attend to which."""
    mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=device).tril()[None, None]
    cast("Any", mask).sees = mask_function
    return mask


@contextmanager
def native_attention(model: PreTrainedModel) -> Generator[None]:
    """Run the block with transformers' own attention, for comparison; afterwards the model has ours.

    Raises: ConfigError if the model cannot run with another attention function; then it has its own again.
    """
    restore_attention(model)
    yield
    model.set_attn_implementation(ATTENTION_NAME)


def prepare_attention(model: PreTrainedModel) -> bool:
    """Give a model packed attention if that computes it right, else leave it its own; the dtype is the caller's (autocast).

    Returns: whether the model keeps its own attention and runs rows of one length at a time (forward.run_native).
    Raises: ConfigError for a model that is not causal or gives other results for a row beside others; CheckpointError for a NaN weight.
    """
    mend_own_code(model)
    before = getattr(model.config, "_attn_implementation", None)
    try:
        use_packed_attention(model)
        return False
    except ConfigError as refusal:
        restore_attention(model, before)
        check_native_rows(model)
        why = str(refusal).removesuffix(f" {USE_ANOTHER}").removesuffix(".")
    _logger.warning(
        "%s runs with its own attention, one call for each distinct length of rows, which is slower than packed rows: %s",
        type(model).__name__,
        why,
    )
    warn_of_ties(model)
    return True


def warn_of_ties(model: PreTrainedModel) -> None:
    """Warn if a model chooses the tokens that it attends to by so few index heads that their scores are often tied."""
    heads = getattr(model.config.get_text_config(), "index_n_heads", None)
    if isinstance(heads, int) and heads < MANY_INDEX_HEADS:
        _logger.warning(
            "%s chooses the tokens that it attends to by index_n_heads = %d: scores of exactly 0, about one in %d, are tied, and which of "
            "them are chosen may change with the length of a pass and between trainer and engine. Use a model with at least %d",
            type(model).__name__,
            heads,
            2**heads,
            MANY_INDEX_HEADS,
        )


def check_native_rows(model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
    """Check on random tokens that a model with its own attention can run rows of one length together.

    Args:
        compute_dtype: as in use_packed_attention.

    Raises: ConfigError if a later token changes an earlier result, if a row has other results beside others than alone, or if logits are
        more than an output layer; CheckpointError for a model with a NaN weight.
    """
    check_finite_weights(model.named_parameters(), f"this {type(model).__name__}")
    device = next(model.parameters()).device
    kind, was_training = type(model).__name__, model.training
    has_logits = model.get_output_embeddings() is not None
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16) if compute_dtype == torch.bfloat16 else nullcontext():
            length = find_check_length(model, find_widest(model), at_least=9)
            tokens = draw_check_tokens(model, (3, length))
            tokens[2, : length // 2] = tokens[1, : length // 2]  # the third row is the second with another end
            run = cast("Any", model if has_logits else get_decoder(model))
            with open_choices(model) as choices:
                numbers = torch.arange(3 * length).view(3, length)
                with choices.record():
                    rows = [run(input_ids=row[None], use_cache=False) for row in tokens[:2]]
                    begun = torch.where(torch.arange(length) < length // 2, numbers[1], -1)
                    with choices.replay({(1, length): begun}):
                        rows.append(run(input_ids=tokens[2:], use_cache=False))
                expected = torch.cat([row.logits if has_logits else row.last_hidden_state for row in rows])
                _check_finite(model, expected)
                if not is_same(expected[1, : length // 2], expected[2, : length // 2], find_dtype(model, expected)):
                    again = run(input_ids=tokens[1:2], use_cache=False)
                    _refuse_difference(model, expected[1], (again.logits if has_logits else again.last_hidden_state)[0])
                head = get_output_layer(model) if has_logits else None
                (check_output_layer if has_logits else check_value_head)(model)
                with choices.replay({(3, length): numbers.flatten()}):
                    hidden = run_native(model, pack_padded(tokens, torch.full((3,), length, device=device)))
                found = (hidden if head is None else head.compute_logits(hidden)).view(expected.shape)
                dtype = find_dtype(model, found)  # within autocast: changed logits are float32 whatever the passes are
    except ConfigError:
        raise
    except (TypeError, AssertionError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        hint = _advise_float32(model, compute_dtype)
        raise ConfigError(f"{kind} cannot run rows{_quote_fields(model.config)}: {error}{hint}") from error
    finally:
        model.train(was_training)
    what = "logits" if has_logits else "hidden states"
    check_same(found, expected, f"{kind} gives other {what} for rows beside others than alone", dtype)


def _advise_float32(model: PreTrainedModel, compute_dtype: torch.dtype | None) -> str:
    """Return advice for an error of a model's own code that may be one of half precision, as where it mixes float32 with that."""
    found = find_dtype(model, torch.empty(0, device=next(model.parameters()).device))
    if found == torch.float32 and compute_dtype != torch.bfloat16:
        return ""
    return ". Its passes are in bfloat16: take --backend.compute-dtype float32, with weights in float32"


def _refuse_difference(model: PreTrainedModel, found: Tensor, again: Tensor) -> None:
    """Raise ConfigError for a model that gives two rows with one beginning other results there.

    Args:
        found, again: results of one row, from two passes.
    """
    kind = type(model).__name__
    if not is_same(found, again, find_dtype(model, found)):
        raise ConfigError(
            f"{kind} gives other results for the same row each time: its code has dropout that eval() leaves on, or noise of its own. The "
            "ratios of training need the same log-probs twice: turn it off there"
        )
    raise ConfigError(
        f"{kind} is not causal: other tokens at the end of a row change the results at its beginning. Only models that "
        "predict each token from those before it can be trained here"
    )


def check_output_layer(model: PreTrainedModel) -> None:
    """Check that get_output_layer gives the model's own logits of its last hidden states, also large ones, which soft caps bound.

    Raises: ConfigError if it does not, or if the output layer is not linear.
    """
    layer, read, scaled = get_output_layer(model), list[Tensor](), list[Tensor]()

    def enlarge(inputs: Tensor) -> Tensor:
        largest = torch.nn.functional.linear(inputs.to(layer.weight.dtype), layer.weight, layer.bias).abs().max().float().clamp(min=1e-6)
        scaled[:] = [inputs * (100 / largest).to(inputs.dtype)]
        return scaled[0]

    def enlarge_output(_module: Any, _inputs: Any, output: Any) -> None:
        read.append(output.last_hidden_state)
        if layer.before is None:
            output.last_hidden_state = enlarge(output.last_hidden_state)

    def enlarge_input(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if layer.before is not None and read:  # a norm in these layers would undo a change of what they read
            read.append(inputs[0])
        return None if scaled else (enlarge(inputs[0]), *inputs[1:])

    head = cast("torch.nn.Module", model.get_output_embeddings())
    # OPT calls a part of its decoder only, so that the first hook is not reached
    hooks = (get_decoder(model).register_forward_hook(enlarge_output), head.register_forward_pre_hook(enlarge_input))
    try:
        expected = cast("Any", model)(input_ids=draw_check_tokens(model, (1, 5)), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    _check_finite(model, scaled[0], expected)
    if layer.before is not None and len(read) == 2:
        dtype = find_dtype(model, read[1])
        check_same(layer.before(read[0]), read[1], f"{type(model).__name__} gives other results before its output layer", dtype)
    found = layer.read(scaled[0]).view(expected.shape)
    dtype = find_dtype(model, found)
    if not _measure_difference(found, expected) <= (1e-4 if dtype == torch.float32 else 5e-2):
        raise ConfigError(
            f"{type(model).__name__} changes the logits of its output layer in a way that is not computed here"
            f"{_quote_fields(model.config)}: use another model"
        )


def check_value_head(model: PreTrainedModel) -> None:
    """Check that read_value_head gives the model's own scores; a model without a head of one value, as a bare decoder, is left alone.

    Raises: ConfigError if it does not: for a model that reads its score at another place than the last token, for example.
    """
    try:
        get_value_head(model)
    except ConfigError:
        return
    tokens = draw_check_tokens(model, (4, 9))
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    if pad is not None:
        tokens[tokens == pad] = int(tokens[tokens != pad][0])  # so that the last token is the one whose score is read
    read: list[Tensor] = []
    hook = get_decoder(model).register_forward_hook(lambda _module, _inputs, output: read.append(output[0][0]))
    try:  # one row at a time; a row has 9 values, or one score
        own = [cast("Any", model)(input_ids=row[None], use_cache=False).logits.flatten() for row in tokens]
    finally:
        hook.remove()
    found = torch.cat([read_value_head(model, hidden)[-len(values) :] for hidden, values in zip(read, own, strict=True)])
    expected = torch.cat(own)
    _check_finite(model, found, expected)
    if not is_same(found, expected, find_dtype(model, expected)):
        raise ConfigError(
            f"{type(model).__name__} computes its score in another way than by a head on the hidden state of the last token, which "
            "is not done here: serve it, and ask it over HTTP (open_remote_reward)"
        )


def find_widest(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens that the configuration names as a bound of what a layer reads; None without one."""
    config = model.config.get_text_config()
    found = [value for name in _BOUNDS if isinstance(value := getattr(config, name, None), int) and value > 0]
    return max((width for width in found if width <= LONGEST_CHECK), default=None)


def use_packed_attention(model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
    """Make a model attend inside packed rows, and check that on random tokens, in rows longer than its windows.

    Args:
        compute_dtype: dtype of matrix products in later passes (autocast); None = the caller's setting.

    Raises: ConfigError naming a feature of the model besides causal attention over whole rows or sliding windows, or if packed rows give
        other hidden states or logits than the same rows one by one; CheckpointError for a model with a NaN weight.
    """
    check_finite_weights(model.named_parameters(), f"this {type(model).__name__}")
    device = next(model.parameters()).device
    rounded = compute_dtype == torch.bfloat16
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=True) if rounded else nullcontext():
            window = probe_attention(model)
            longest = find_check_length(model, window, at_least=9)
            tokens = draw_check_tokens(model, (3, longest))
            lengths = torch.tensor([longest, 4, longest], device=device)
            has_logits = model.get_output_embeddings() is not None
            with early_temperatures(model), open_choices(model) as choices:
                head = get_output_layer(model) if has_logits else None
                with native_attention(model):
                    (check_output_layer if has_logits else check_value_head)(model)
                    run = cast("Any", model if has_logits else get_decoder(model))
                    with choices.record():
                        outputs = [run(input_ids=tokens[i : i + 1, : int(n)], use_cache=False) for i, n in enumerate(lengths)]
                rows = [(output.logits if has_logits else output.last_hidden_state)[0] for output in outputs]
                num_tokens = int(lengths.sum())
                with choices.replay({(1, num_tokens): torch.arange(num_tokens)}):
                    packed = run_packed(model, pack_padded(tokens, lengths))
                found = packed if head is None else head.compute_logits(packed)
                dtype = find_dtype(model, found)  # within autocast: changed logits are float32 whatever the passes are
    except ConfigError:
        raise
    except (TypeError, AssertionError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        hint = _advise_float32(model, compute_dtype)
        raise ConfigError(f"{type(model).__name__} cannot run packed rows{_quote_fields(model.config)}: {error}{hint}") from error
    finally:
        model.train(was_training)
    what = "logits" if head is not None else "hidden states"
    what = f"{type(model).__name__} gives other {what} for packed than for single rows"
    check_same(found, torch.cat(rows), what, dtype)


def probe_attention(model: PreTrainedModel) -> int | None:
    """Run a model on one short row and read the attention settings of each layer.

    Returns: the widest sliding window of its layers, or three chunks; None if all attend to whole rows. Afterwards the model has
        transformers' attention.
    Raises: ConfigError for a layer with any other attention than causal over whole rows, a sliding window or chunks.
    """
    check_layer_kinds(model, PACKED_LAYERS)
    masks = ProbedMasks(model.config.get_text_config())
    windows: set[int] = set()
    calls = 0
    tokens = draw_check_tokens(model, (1, 5))
    packed = pack_padded(tokens, torch.full((1,), 5, device=tokens.device))

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None) -> Tensor:
        nonlocal calls
        calls += 1
        windows.update(() if window is None else (window,))
        chunk = find_chunk(module)
        windows.update(() if chunk is None else (min(3 * chunk, max(chunk, LONGEST_CHECK)),))  # rows of more than three chunks
        return attend_packed(module, query, key, value, scaling, dropout, window, packed=packed)

    restore_attention(model)
    before = cast("Any", model.config)._attn_implementation
    model.set_attn_implementation(PROBE_NAME)
    try:
        run_packed(model, packed, note, masks=masks)
    finally:
        model.set_attn_implementation(before)
    if calls == 0:
        raise ConfigError(f"{type(model).__name__} has no layer whose attention function can be replaced. {USE_ANOTHER}")
    return max(windows, default=None)


def check_layer_kinds(model: PreTrainedModel, known: Sequence[str] = ATTENTION_LAYERS) -> None:
    """Raise ConfigError if the configuration names layers of another kind than the known ones."""
    config: Any = model.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - set(known)
    if kinds:
        raise ConfigError(
            f"{type(model).__name__} has layers that are not computed here: layer_types of its configuration (model_type "
            f"{config.model_type!r}) has {', '.join(map(repr, sorted(kinds)))}, and known are {', '.join(known)}. {USE_ANOTHER}"
        )


def find_check_length(model: PreTrainedModel, window: int | None, *, at_least: int) -> int:
    """Return the length in tokens of a row longer than the window, within LONGEST_CHECK and the model's context."""
    wanted = at_least if window is None or window > LONGEST_CHECK else max(at_least, window + 9)
    return min(wanted, find_context_length(model.config) or wanted)


def draw_check_tokens(model: PreTrainedModel, shape: tuple[int, int]) -> Tensor:
    """Draw random tokens of the model's vocabulary, always the same ones, on its device."""
    vocab_size = int(cast("Any", model).config.get_text_config().vocab_size)
    vocab_size = min(vocab_size, read_limits(model).num_embeddings)
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)


def find_dtype(model: PreTrainedModel, found: Tensor) -> torch.dtype:
    """Return the least exact dtype that a model computes in: that of its weights, its results, or autocast."""
    device = found.device.type
    dtypes = [found.dtype, next(model.parameters()).dtype]
    dtypes += [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


def check_same(found: Tensor, expected: Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    """Raise ConfigError if two results of a model differ by more than rounding.

    Args:
        dtype: dtype of the computation; None = that of the results.
    """
    difference = _measure_difference(found, expected)
    if not is_same(found, expected, dtype or found.dtype):
        raise ConfigError(
            f"{what} (relative difference {difference:.2g}): its layers mix positions in another way than full causal attention, "
            "which this code cannot run"
        )


def is_same(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of computations in a dtype differ by rounding alone."""
    return _measure_difference(found, expected) <= (1e-3 if dtype == torch.float32 else 5e-2)


def _check_finite(model: PreTrainedModel, *results: Tensor) -> None:
    if not all(bool(torch.isfinite(result).all()) for result in results):
        raise ConfigError(f"{type(model).__name__} gives logits that are not finite for random tokens: look at its weights and its dtype")


def _measure_difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6))


def _register() -> None:
    """Register the attention functions with transformers; repeating it is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, cast("Callable[..., Any]", attend))
    AttentionInterface.register(PROBE_NAME, cast("Callable[..., Any]", attend_probe))
    AttentionMaskInterface.register(PROBE_NAME, cast("Callable[..., Any]", probe_mask))


def restore_attention(model: PreTrainedModel, before: str | None = None) -> None:
    """Give a model with our attention transformers' own: `before`, or, if the model was made from a config of one of ours, the default."""
    _register()
    if cast("Any", model.config)._attn_implementation in (ATTENTION_NAME, PROBE_NAME):
        try:
            model.set_attn_implementation("sdpa" if before in (None, ATTENTION_NAME, PROBE_NAME) else before)
        except ValueError:  # only the plain implementation computes this attention
            model.set_attn_implementation("eager")


def _quote_fields(config: Any) -> str:
    """Format a config's windows, chunks and kinds of layers, for messages."""
    config = config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "layer_types", "layers_block_type", "index_topk")
    told = {name: getattr(config, name, None) for name in names}
    shown = [
        f"{name} = {sorted(set(value)) if isinstance(value, list | tuple) else value!r}"
        for name, value in told.items()
        if value is not None
    ]
    return f" (model_type {config.model_type!r}" + "".join(f", {text}" for text in shown) + ")"
