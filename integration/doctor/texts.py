"""Checks of the tokenizer, the chat template and the rows of SFT: what is trained on, in text, against the conversation it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from integration.doctor.findings import Finding, judge, skip
from rollouts.chat.tokenize import render_messages
from rollouts.data.preference_pairs import PreferencePair
from rollouts.errors import ConfigError, DataError
from rollouts.types import Message, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSED = "data"
"""Name of the finding of data that cannot be read, without which no other check of the run can be made."""

REFUSED_MODEL = "model"
"""Name of the finding of a model that cannot be loaded or trained, without which no check of numbers can be made."""

_SEEN = 200  # characters of a text in a message
_FEWEST = 20  # pairs below which lengths are not judged
_UNEVEN = 0.25  # share of good, or of bad answers, below which the others outweigh them
_ONE_SIDED = 0.9  # share of pairs whose chosen answer is the longer one, from which its length gives it away


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, num_embeddings: int, texts: Sequence[str]) -> Finding:
    """Check that texts become ids of the model and come back unchanged.

    Args:
        num_embeddings: rows of the model's embedding.
        texts: texts of the user's rows.
    """
    name = "tokenizer"
    ids = [encode_text(tokenizer, text) for text in texts]
    beyond = max((token for row in ids for token in row), default=0)
    unknown = sum(token == tokenizer.unk_token_id for row in ids for token in row) if tokenizer.unk_token_id is not None else 0
    total = sum(map(len, ids))
    changed = next((text for text, row in zip(texts, ids, strict=True) if _decode(tokenizer, row).strip() != text.strip()), None)
    if beyond >= num_embeddings:
        found = f"a text of the data has the token id {beyond}, but the model has {num_embeddings} embeddings"
        return judge(name, found, fails=True, advice="the tokenizer is that of another model: load both from the same --model.path")
    if unknown:
        found = f"{unknown} of {total} tokens of {len(texts)} texts are unknown to the tokenizer ({tokenizer.unk_token!r})"
        advice = "the model cannot read these characters: clean the data, or take the tokenizer of the model"
        return judge(name, found, warns=True, fails=unknown > total / 10, advice=advice)
    if changed is not None:
        back = _decode(tokenizer, encode_text(tokenizer, changed))
        found = f"a text does not survive encoding and decoding: {changed[:_SEEN]!r} becomes {back[:_SEEN]!r}"
        advice = "rewards and reports read decoded text; a tokenizer that normalises is usual for some models"
        return judge(name, found, warns=True, advice=advice)
    some = f"{len(texts)} texts ({total} tokens) encode and decode unchanged; largest id {beyond} of {num_embeddings} embeddings"
    return judge(name, some) if texts else skip(name, "no texts of the data to try")


def check_refused(error: DataError, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> list[Finding]:
    """Return the findings of data that cannot be read with this tokenizer and its chat template, which is checked alone."""
    advice = "mend what the message names, or give the tokenizer and the chat template of the model; the other checks need the data"
    template = check_template(tokenizer, several_turns=False, template_kwargs=template_kwargs)
    return [judge(REFUSED, str(error), fails=True, advice=advice), template]


def refuse_model(error: ConfigError) -> Finding:
    """Return the finding of a model that cannot be loaded or trained."""
    return judge(REFUSED_MODEL, str(error), fails=True, advice="mend what the message names; the other checks need the model")


def check_masks(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]) -> Finding:
    """Check that the trained tokens of each row are the text of its assistant messages, and of no other message.

    The text is read back from the tokens, so that the check does not depend on how the mask was made.
    """
    name = "loss masks"
    if not samples:
        return skip(name, "no rows of SFT or of preferences")
    trained = total = 0
    for sample in samples:
        runs = split_runs(sample)
        trained, total = trained + sum(end - start for start, end in runs), total + len(sample.tokens)
        texts = [_decode(tokenizer, sample.tokens[start:end]) for start, end in runs]
        wrong = find_wrong_text(sample, texts)
        if wrong:
            advice = "the mask and the conversation disagree: look at {% generation %} in the chat template, and at loss masks of your own"
            return judge(name, f"row {sample.index}: {wrong}", fails=True, advice=advice)
    return judge(name, f"exactly the assistant's text is trained on in {len(samples)} rows ({trained} of {total} tokens)")


def check_pairs(rows: Sequence[PreferencePair | Sample]) -> Finding:
    """Check that pairs do not contradict one another, and that the chosen answer cannot be told by its length alone.

    Args:
        rows: pairs, or labelled answers.
    """
    name, pairs = "preferences", [row for row in rows if isinstance(row, PreferencePair)]
    if not rows:
        return skip(name, "no preferences to train on")
    if not pairs:
        good = sum((row.reward or 0.0) > 0 for row in rows if isinstance(row, Sample))
        advice = "weigh the fewer ones more: --preference.desirable-weight, --preference.undesirable-weight"
        one_sided = not _UNEVEN <= good / len(rows) <= 1 - _UNEVEN
        return judge(name, f"{good} of {len(rows)} answers are good", warns=one_sided, advice=advice)
    seen = {(pair.chosen.tokens, pair.rejected.tokens) for pair in pairs}
    turned = sum((pair.rejected.tokens, pair.chosen.tokens) in seen for pair in pairs)
    if turned:
        found = f"{turned} of {len(pairs)} pairs stand in the data the other way round, too"
        return judge(name, found, fails=turned > len(pairs) / 10, warns=True, advice="such pairs teach nothing: decide each once")
    longer = sum(len(pair.chosen.tokens) > len(pair.rejected.tokens) for pair in pairs)
    shorter = sum(len(pair.chosen.tokens) < len(pair.rejected.tokens) for pair in pairs)
    share, word = max((longer / len(pairs), "longer"), (shorter / len(pairs), "shorter"))
    found = f"{len(pairs)} pairs, none of which contradict; the chosen answer is {word} in {share:.0%}"
    advice = f"the policy may learn to answer {word} and nothing else: look at lengths during training, or balance the pairs"
    return judge(name, found, warns=len(pairs) >= _FEWEST and share > _ONE_SIDED, advice=advice)


def split_runs(sample: Sample) -> list[tuple[int, int]]:
    """Return the stretches [start, end) of trained tokens."""
    runs: list[tuple[int, int]] = []
    for position, mask in enumerate(sample.loss_mask):
        if mask > 0 and runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        elif mask > 0:
            runs.append((position, position + 1))
    return runs


def find_wrong_text(sample: Sample, trained: Sequence[str]) -> str:
    """Return what is wrong with the trained texts of a row, compared with its messages; "" = nothing.

    Args:
        trained: text of each stretch of trained tokens.
    """
    prompt = () if isinstance(sample.prompt, str) else sample.prompt
    if not trained:
        return "no token is trained on"
    joined = "".join(trained)
    if "".join(sample.response.split()) not in "".join(joined.split()):  # the actions of an episode are joined by new lines
        return f"the answer {sample.response[:_SEEN]!r} is not trained on as a whole: trained on is {joined[:_SEEN]!r}"
    for message in prompt:
        content = (message.content or "").strip()
        if message.role != "assistant" and len(content) > 3 and any(content in text for text in trained) and content not in sample.response:
            return f"a message of the {message.role} is trained on: {content[:_SEEN]!r}"
    if isinstance(sample.prompt, str) and len(sample.prompt.strip()) > 3 and sample.prompt.strip() in joined:
        return f"the prompt is trained on: {sample.prompt[:_SEEN]!r}"
    if len(trained) > 1 and isinstance(sample.prompt, str) and not (sample.turns or sample.messages):
        return f"the answer is trained on in {len(trained)} pieces, with gaps between them"
    return ""


def check_end(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample], stop_ids: frozenset[int]) -> Finding:
    """Check that the end of an answer is trained on, at which the engine stops.

    Args:
        stop_ids: ids at which generation ends.
    """
    name = "end of answers"
    complete = [sample for sample in samples if split_runs(sample)]
    if not complete:
        return skip(name, "no rows of SFT or of preferences")
    ended = sum(
        any(sample.tokens[p] in stop_ids and sample.loss_mask[p] > 0 for p in range(split_runs(sample)[-1][0], len(sample.tokens)))
        for sample in complete
    )
    names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in sorted(stop_ids))
    found = f"{ended} of {len(complete)} rows train the token at which generation stops ({names or 'none is known'})"
    advice = (
        "a model that never learns to end its answers runs into --generation.max-tokens: end the completions with the end token, let "
        "the chat template put its end of turn inside of {% generation %}, or name the token in generation_config.json"
    )
    return judge(name, found, fails=ended == 0, warns=ended < len(complete), advice=advice)


def check_template(tokenizer: PreTrainedTokenizerBase, *, several_turns: bool, template_kwargs: dict[str, Any] | None = None) -> Finding:
    """Check that the chat template renders the beginning of a conversation as it renders it later, thinking included.

    Args:
        several_turns: whether the run has conversations of several turns, where a rewritten history costs further contexts.
    """
    name = "chat template"
    if not getattr(tokenizer, "chat_template", None):
        return skip(name, "the tokenizer has no chat template; rows of plain text need none")
    first = [
        Message(role="user", content="What is 2 + 2?"),
        Message(role="assistant", content="<think>\nTwo and two.\n</think>\n\nIt is 4."),
    ]
    later = [*first, Message(role="user", content="And 3 + 3?")]
    kwargs = template_kwargs or {}
    try:
        early = render_messages(tokenizer, first, template_kwargs=kwargs)
        whole = render_messages(tokenizer, later, add_generation_prompt=True, template_kwargs=kwargs)
    except DataError as error:
        return judge(
            name, f"the template refuses a plain conversation: {error}", warns=True, advice="use the template of the model, or rows of text"
        )
    missing = [part for part in ("Two and two.", "It is 4.") if part not in early]
    if missing:
        found = f"the template drops {missing[0]!r} from the answer that it renders last"
        return judge(name, found, fails=True, advice="the answer that is trained on is not that of the data: mend the template")
    if not whole.startswith(early.rstrip()):
        dropped = "drops the thinking of earlier turns" if "Two and two." not in whole else "renders earlier turns differently later"
        advice = (
            "each turn is then a context of its own, and rows of SFT with several turns are refused: take a template that keeps history"
        )
        return judge(name, f"the template {dropped}", fails=several_turns, warns=True, advice=advice)
    return judge(name, "the beginning of a conversation stays as it is when the conversation goes on, thinking included")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text, without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # pyright: ignore[reportArgumentType]


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
