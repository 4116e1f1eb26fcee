"""Row formats of data sets, recognized by their columns: those of TRL, verl, ShareGPT, Alpaca and the chat format of OpenAI.

Each function turns a row into the one form that a stage reads. docs/data.md lists the formats with examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from rollouts.chat.tokenize import parse_messages, parse_prompt_content
from rollouts.checks import parse_json, show_value
from rollouts.errors import DataError
from rollouts.types import Message, PromptContent

Row: TypeAlias = dict[str, Any]
Columns: TypeAlias = tuple[tuple[str, str], ...]
"""(new name, column it is read from), where the column may be a path into objects, such as reward_model.ground_truth."""

CONVERSATION_FORMATS = (
    "messages",
    "prompt and completion",
    "question and answer",
    "conversations (ShareGPT)",
    "instruction and output (Alpaca)",
    "text",
)
PROMPT_FORMATS = ("prompt", "messages", "question", "conversations (ShareGPT)", "instruction (Alpaca)")
PAIR_FORMATS = ("chosen and rejected, with or without prompt", "prompt, completion and label (true or false)")

_SPEAKERS: Mapping[str, str] = MappingProxyType({
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function": "tool", "function_call": "assistant",
})  # fmt: skip
"""Role of each speaker of ShareGPT."""


def rename_columns(row: Mapping[str, Any], columns: Columns, where: str) -> Row:
    """Return the row with columns under new names; a column that is read under a new name is gone under its own.

    Raises: DataError for a column that the row lacks.
    """
    renamed = {new: _find_column(row, old, where) for new, old in columns}
    taken = {old for _, old in columns}
    return {**{name: value for name, value in row.items() if name not in taken}, **renamed}


def _find_column(row: Mapping[str, Any], path: str, where: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(f"{where}: there is no column {path!r}, which the renaming of columns wants; found {_show_columns(row)}")
        value = cast("Mapping[str, Any]", value)[name]
    return value


def read_conversation(row: Row, where: str) -> Row:
    """Return a row to train on as "messages", "prompt" and "completion", or "text", with its other columns.

    Raises: DataError for a row of an unknown format, or whose values do not fit its format.
    """
    if "chosen" in row and "rejected" in row:
        raise DataError(
            f"{where}: a pair of answers (chosen, rejected), which trains a reward model (rollouts train-reward-model), not SFT: for SFT "
            "on the better answers rename it (prompt and completion=chosen, or messages=chosen)"
        )
    if "completion" in row and isinstance(row.get("label"), bool):
        raise DataError(
            f"{where}: an answer with a label (prompt, completion, label), which trains a reward model (rollouts train-reward-model), "
            "not SFT: keep the good ones, without the column label"
        )
    row = _read_tools(row, where)
    if "messages" in row:
        messages = read_messages(row["messages"], where)
        return {**row, "messages": _with_answer(messages, where)}
    if "prompt" in row and "completion" in row:
        prompt, completion = _read_content(row["prompt"], f"{where}: prompt"), row["completion"]
        if not isinstance(completion, str):
            completion = [message.to_dict() for message in read_messages(completion, f"{where}: completion")]
            if isinstance(prompt, str):
                prompt = (Message(role="user", content=prompt),)
        return {**row, "prompt": prompt if isinstance(prompt, str) else [m.to_dict() for m in prompt], "completion": completion}
    if "conversations" in row:
        messages, rest = _read_sharegpt(row, where)
        return {"messages": _with_answer(messages, where), **rest}
    if "instruction" in row and "output" in row:
        messages, rest = _read_alpaca(row, where)
        answer = _read_text(rest.pop("output"), f"{where}: output")
        return {"messages": [*(m.to_dict() for m in messages), {"role": "assistant", "content": answer}], **rest}
    if "question" in row and "answer" in row:
        rest = {key: value for key, value in row.items() if key not in ("question", "answer")}
        turns = (("user", row["question"]), ("assistant", row["answer"]))
        messages = parse_messages([{"role": role, "content": content} for role, content in turns], where)
        return {"messages": [message.to_dict() for message in messages], **rest}
    if "text" in row:
        _read_text(row["text"], f"{where}: text")
        return row
    hint = "; prompts without answers of the assistant are for RL alone (--mode rl)" if "prompt" in row else ""
    raise DataError(describe_unknown(row, where, "SFT", CONVERSATION_FORMATS, example="completion") + hint)


def read_question(row: Row, where: str, *, as_messages: bool) -> tuple[PromptContent, Row]:
    """Return the prompt of a row, and its other columns as metadata with "ground_truth" if the row has an answer to compare with.

    The ground truth is the column of that name, else "answer" (cut to what is behind "####", as in GSM8K), else "ground_truth" of the
    object "reward_model" (verl), else "output" (Alpaca).

    Args:
        as_messages: make a question or instruction a message of the user; False leaves it a text, for models without a chat template.
    """
    content: PromptContent
    if "prompt" in row:
        content, metadata = _read_content(row["prompt"], f"{where}: prompt"), _without(row, "prompt")
    elif "messages" in row:
        content, metadata = read_messages(row["messages"], where), _without(row, "messages")
    elif "question" in row:
        content, metadata = _read_text(row["question"], f"{where}: question"), _without(row, "question")
        content = (Message(role="user", content=content),) if as_messages else content
    elif "conversations" in row:
        content, metadata = _read_sharegpt(row, where)
    elif "instruction" in row:
        messages, metadata = _read_alpaca(row, where)
        content = messages if as_messages or len(messages) != 1 else str(messages[0].content)
    else:
        raise DataError(describe_unknown(row, where, "RL", PROMPT_FORMATS, example="prompt"))
    if not isinstance(content, str) and content[-1].role == "assistant":
        raise DataError(f"{where}: the prompt ends with an assistant message, which would give the answer away: remove it")
    truth = _find_truth(metadata)
    if metadata.get("ground_truth") is None and truth is not None:
        metadata["ground_truth"] = truth
    return content, metadata


def _find_truth(metadata: Mapping[str, Any]) -> Any:
    if metadata.get("answer") is not None:
        return final_answer(metadata["answer"])
    rule: Any = metadata.get("reward_model")
    if isinstance(rule, Mapping):
        return cast("Mapping[str, Any]", rule).get("ground_truth")
    return metadata.get("output")


def final_answer(answer: Any) -> Any:
    """Return the text behind the last "####" of an answer, without thousands separators; any other answer as it is."""
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return answer.rsplit("####", 1)[1].strip().replace(",", "")


def read_pair(row: Row, where: str) -> Row:
    """Return a row with two answers as "chosen" and "rejected", with "prompt" if both are texts.

    Texts without a prompt are cut where they begin to differ, as TRL does, and what they share is the prompt.
    """
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if missing:
        raise DataError(describe_unknown(row, where, "training on preferences", PAIR_FORMATS, example="chosen"))
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and row.get("prompt") is None:
        shared = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), 0)
        shared -= shared > 0 and chosen[shared - 1] == " "  # a token begins with its space
        if 0 < shared < min(len(chosen), len(rejected)):
            return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
        raise DataError(
            f"{where}: chosen and rejected are texts without a prompt that share no beginning: add the column prompt, which both answer"
        )
    return row


def is_labelled(row: Mapping[str, Any]) -> bool:
    """Whether a row is one answer with a label, good or bad: TRL's unpaired preference."""
    return "label" in row and "completion" in row and "chosen" not in row


def describe_unknown(row: Mapping[str, Any], where: str, reader: str, formats: Sequence[str], *, example: str) -> str:
    """Return the message about a row whose columns are those of no known format."""
    return (
        f"{where}: {reader} knows no row with {_show_columns(row)}. It reads rows with {'; '.join(formats)}. Rename columns with "
        f"--data.columns {example}=NAME, or see docs/data.md"
    )


def _show_columns(row: Mapping[str, Any]) -> str:
    return f"the columns {', '.join(map(str, row))}" if row else "no columns"


# -- the values of a row


def read_messages(data: Any, where: str) -> tuple[Message, ...]:
    """Return messages of OpenAI's chat format, whose content may be a list of texts. Raises DataError for anything else."""
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        items = cast("Sequence[Any]", data)
        data = [_join_parts(message, f"{where}: message {i}") for i, message in enumerate(items)]
    return parse_messages(data, where)


def _join_parts(message: Any, where: str) -> Any:
    """Return a message with its content as one text, if it is a list of parts {"type": "text", "text": ...}."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):  # pyright: ignore[reportUnknownMemberType]
        return message
    fields = dict(cast("Mapping[str, Any]", message))
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in fields["content"]]
    if any(kind != "text" for kind in kinds):
        raise DataError(f"{where} has content of the types {kinds}; only parts of the type text are read: models here read text alone")
    return {**fields, "content": "".join(str(part.get("text") or "") for part in fields["content"])}


def _read_content(data: Any, where: str) -> PromptContent:
    return parse_prompt_content(data, where) if isinstance(data, str) else read_messages(data, where)


def _read_text(data: Any, where: str) -> str:
    if not isinstance(data, str) or not data:
        raise DataError(f"{where} is {show_value(data)}, expected a text that is not empty")
    return data


def _with_answer(messages: tuple[Message, ...], where: str) -> list[dict[str, Any]]:
    if not any(message.role == "assistant" for message in messages):
        raise DataError(f"{where}: no message has the role assistant, found {[m.role for m in messages]}: there is nothing to train on")
    return [message.to_dict() for message in messages]


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _read_tools(row: Row, where: str) -> Row:
    """Return the row with its tools as a list of JSON schemas, which may stand as JSON in a text; without the column if it is empty."""
    if "tools" not in row:
        return row
    tools: Any = row["tools"]
    if isinstance(tools, str) and tools.strip():
        tools = _parse_json(tools, f"{where}: tools")
    if not tools:
        return _without(row, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in cast("list[Any]", tools)):
        raise DataError(f"{where}: tools is {show_value(tools)}, expected a list of JSON schemas, or a text with one")
    return {**row, "tools": tools}


def _parse_json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}; it begins with {text[:60]!r}") from error


def _read_sharegpt(row: Row, where: str) -> tuple[tuple[Message, ...], Row]:
    """Return the messages of "conversations" (and "system", if the row has one), and the other columns."""
    turns, rest = row["conversations"], _without(row, "conversations", "system")
    if not isinstance(turns, list) or not turns:
        raise DataError(f'{where}: conversations is {show_value(turns)}, expected a list of {{"from": ..., "value": ...}}')
    first: list[Any] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    read = [_read_turn(turn, f"{where}: turn {i}") for i, turn in enumerate(cast("list[Any]", turns))]
    return read_messages([*first, *read], where), rest


def _read_turn(turn: Any, where: str) -> Any:
    if not isinstance(turn, Mapping) or "from" not in turn:
        return cast("Any", turn)  # "role" and "content", or an error of read_messages
    fields = cast("Mapping[str, Any]", turn)
    role = _SPEAKERS.get(str(fields["from"]))
    if role is None:
        raise DataError(f'{where} is "from" {show_value(fields["from"])}, expected one of {", ".join(_SPEAKERS)}')
    value = fields.get("value")
    if not isinstance(value, str):
        raise DataError(f"{where}: value is {show_value(value)}, expected a text")
    if fields["from"] != "function_call":
        return {"role": role, "content": value}
    call: Any = _parse_json(value, f"{where}: the value of a function_call")
    calls = cast("list[Any]", call) if isinstance(call, list) else [call]
    return {"role": role, "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _read_alpaca(row: Row, where: str) -> tuple[tuple[Message, ...], Row]:
    """Return the messages before the answer, and the other columns. The input stands below the instruction, after an empty line."""
    rest = _without(row, "instruction", "input", "system", "history")
    instruction, given = _read_text(row["instruction"], f"{where}: instruction"), row.get("input")
    if given is not None and not isinstance(given, str):
        raise DataError(f"{where}: input is {show_value(given)}, expected a text, or no such column")
    turns: list[Any] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for pair in row.get("history") or ():
        if not isinstance(pair, list) or len(cast("list[Any]", pair)) != 2:
            raise DataError(f"{where}: history holds {show_value(pair)}, expected [instruction, answer]")
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), cast("list[Any]", pair), strict=True)]
    turns.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    return parse_messages(turns, where), rest
