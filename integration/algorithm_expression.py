"""--rl.algorithm: an expression that composes presets, as text, and the Algorithm that it means.

    grpo                                        a preset with its defaults
    dapo(clip_high=0.28)                        with arguments: numbers, strings, True, False, None
    decoupled(dapo(clip_high=0.28), cap=5.0)    a preset around a preset
    my_module:my_algorithm                      a function of the user's that returns an Algorithm; also path/to/file.py:my_algorithm
    truncated(my_module:my_algorithm(beta=0.1))

The text is parsed, never evaluated: only names of presets, references to functions, calls of them, literals and, where a preset takes one,
the name of a KL estimator (kl=k2), of an interpolation (approximate=interpolate_log_probs) or of a combination (combine=interpolate) mean
something. A reference imports its
module, as `import` does, so name only modules you trust. Of what the module holds, only functions that are there to make algorithms are
called: written in Python, and either with the return annotation `-> Algorithm`, or defined in the .py file that the reference names.
os:system, builtins:eval and the like are refused.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from rollouts import algorithms
from rollouts.config import suggest
from rollouts.errors import ConfigError, locate_error
from rollouts.gigpo import Combine, add_weighted, interpolate
from rollouts.kl import KLEstimator, abs_kl, k1, k2, k3
from rollouts.proximal import Interpolation, interpolate_log_probs, interpolate_probs
from rollouts.rewards.answers import load_function
from rollouts.types import Algorithm

Preset = Callable[..., Algorithm]


def find_presets() -> dict[str, Preset]:
    """The public functions of rollouts/algorithms.py that return an Algorithm, by name, in the order of the file."""
    found = [
        function
        for name, function in inspect.getmembers(algorithms, inspect.isfunction)
        if function.__module__ == algorithms.__name__ and not name.startswith("_") and _returns_algorithm(function)
    ]
    return {function.__name__: function for function in sorted(found, key=lambda function: function.__code__.co_firstlineno)}


def _read_hints(function: Preset) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (TypeError, NameError, AttributeError):  # a function of the user's, whose annotations need not mean anything
        return {}


def _returns_algorithm(function: types.FunctionType) -> bool:
    """Whether the function says that it returns an Algorithm: its annotation resolves to it or, if it cannot be resolved, is named so."""
    annotation = _read_hints(function).get("return", function.__annotations__.get("return"))
    return annotation is Algorithm or (isinstance(annotation, str) and annotation.rpartition(".")[2] == "Algorithm")


PRESETS: Mapping[str, Preset] = find_presets() | {"gae": algorithms.ppo}  # the latter by its estimator, as verl calls it
KL_ESTIMATORS: Mapping[str, KLEstimator] = {estimator.__name__: estimator for estimator in (k1, abs_kl, k2, k3)}  # as kl=k2
INTERPOLATIONS: Mapping[str, Interpolation] = {f.__name__: f for f in (interpolate_log_probs, interpolate_probs)}  # as approximate=...
COMBINATIONS: Mapping[str, Combine] = {f.__name__: f for f in (add_weighted, interpolate)}  # as combine=...
FUNCTIONS: tuple[tuple[Any, Mapping[str, Any]], ...] = (  # by their type
    (KLEstimator, KL_ESTIMATORS),
    (Interpolation, INTERPOLATIONS),
    (Combine, COMBINATIONS),
)
MAX_LENGTH = 2000  # characters
MAX_DEPTH = 8  # presets inside of presets
# a drive, a path or a dotted module, a colon and a name; strings come first, so that what stands in quotes is no reference
WHOLE_REFERENCE = re.compile(r"(?P<string>(?!))?[^()'\"]+:[^()'\":]*")
REFERENCE = re.compile(r"""(?P<string>'[^']*'|"[^"]*")|(?:\b[A-Za-z]:(?=[\\/]))?[\w.~/\\-]+:[A-Za-z_]\w*""")


@dataclass(frozen=True)
class PresetCall:
    """A parsed expression: a function and its arguments, some of which are expressions again."""

    name: str  # of a preset, or the reference to a function
    function: Preset
    arguments: Mapping[str, Any]  # those that were given; a value is a literal or a PresetCall
    text: str  # as it was written


def resolve_algorithm(expression: str, max_tokens: int) -> Algorithm:
    """The algorithm that an expression means.

    Args:
        max_tokens: the token budget of a response, for presets with an argument of this name that the expression does not give.

    Raises: ConfigError saying where in the expression, what was found and what to do.
    """
    return create_algorithm(parse_algorithm(expression), max_tokens, expression)


def parse_algorithm(expression: str) -> PresetCall:
    """Parse an expression and check the names and types of its arguments. Imports the modules of references; creates no Algorithm.

    Raises: ConfigError.
    """
    if len(expression) > MAX_LENGTH:
        raise ConfigError(f"the algorithm has {len(expression):,} characters, expected at most {MAX_LENGTH:,}: write it as module:function")
    text = expression.strip().replace("\n", " ")  # one line, so that a column is a place
    if not text:
        raise ConfigError(f"the algorithm is {expression!r}, expected an expression such as grpo(): {list_presets()}")
    references: dict[int, str] = {}

    def hide(match: re.Match[str]) -> str:
        if match["string"] is not None:
            return match[0]
        references[len(text[: match.start()].encode())] = match[0]
        return "_" * len(match[0].encode())  # a name that keeps the columns of all that follows

    source = _Source(text, references)
    # the path of a file may hold anything, spaces too, unless arguments follow it
    pattern = WHOLE_REFERENCE if WHOLE_REFERENCE.fullmatch(text) else REFERENCE
    hidden = pattern.sub(hide, text)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(hidden, mode="eval")
    except SyntaxError as error:
        raise ConfigError(
            f"cannot read the algorithm {source.show()}: {error.msg} at column {max(1, error.offset or 1)}. Write it as grpo(kl_coef=0.1)"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"cannot read the algorithm {source.show()}: {reason}. Write it as grpo(kl_coef=0.1)") from error
    return _parse_call(source, tree.body, depth=1)


def create_algorithm(call: PresetCall, max_tokens: int, expression: str | None = None) -> Algorithm:
    """Carry out a parsed expression, inner calls first. Raises ConfigError where a preset refuses its arguments."""
    arguments = {
        name: create_algorithm(value, max_tokens, expression or call.text) if isinstance(value, PresetCall) else value
        for name, value in _complete(call, max_tokens).items()
    }
    where = "" if expression in (None, call.text) else f" (in {expression!r})"
    try:
        algorithm = typing.cast("object", call.function(**arguments))
    except ConfigError as error:
        raise ConfigError(f"{call.text}: {error}{where}") from error
    except Exception as error:  # a reference is to the user's own code: whatever is wrong in it, say where it comes from
        if call.name in PRESETS:
            raise
        raise ConfigError(f"{call.text} raised {type(error).__name__}: {error} ({locate_error(error)}){where}") from error
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"{call.text} returned a {type(algorithm).__name__}, expected an Algorithm{where}")
    return algorithm


def describe_algorithm(expression: str, max_tokens: int) -> str:
    """The expression with every argument written out, defaults too: dapo -> dapo(clip_low=0.2, clip_high=0.28, epsilon=0.0001)."""
    return describe_call(parse_algorithm(expression), max_tokens)


def describe_call(call: PresetCall, max_tokens: int) -> str:
    """describe_algorithm of an expression that is parsed already."""
    given = _complete(call, max_tokens)
    defaults = {name: p.default for name, p in _parameters(call.function).items() if p.default is not inspect.Parameter.empty}
    order = [*_parameters(call.function), *given]
    values = {name: given.get(name, defaults.get(name)) for name in order if name in given or name in defaults}
    shown = (
        f"{key}={describe_call(value, max_tokens) if isinstance(value, PresetCall) else _show(value)}" for key, value in values.items()
    )
    return f"{call.name}({', '.join(shown)})"


def list_presets() -> str:
    """The known names, for messages."""
    return f"known are {', '.join(sorted(PRESETS))}, or module:function"


def _show(value: object) -> str:
    """A value as it is written in an expression: functions by their names."""
    return next((name for _, functions in FUNCTIONS for name, function in functions.items() if function is value), repr(value))


def _complete(call: PresetCall, max_tokens: int) -> dict[str, Any]:
    """The arguments, with the token budget where the function takes one and none was given."""
    budget = {"max_tokens": max_tokens} if "max_tokens" in _parameters(call.function) else {}
    return budget | dict(call.arguments)


@dataclass(frozen=True)
class _Source:
    """The text that is parsed, for messages about places in it."""

    text: str
    references: Mapping[int, str]  # by the byte where each begins

    def show(self) -> str:
        return repr(_shorten(self.text, 200))

    def cut(self, node: ast.expr) -> str:
        return self.text.encode()[node.col_offset : node.end_col_offset].decode()

    def quote(self, node: ast.expr) -> str:
        return repr(_shorten(self.cut(node), 60))

    def place(self, offset: int) -> str:
        return f"at column {len(self.text.encode()[:offset].decode()) + 1} of {self.show()}"


def _parse_call(source: _Source, node: ast.expr, depth: int) -> PresetCall:
    if depth > MAX_DEPTH:
        raise ConfigError(f"the algorithm nests more than {MAX_DEPTH} deep {source.place(node.col_offset)}: write it as module:function")
    positional: list[ast.expr] = []
    keywords: list[ast.keyword] = []
    head = node
    if isinstance(node, ast.Call):
        head, positional, keywords = node.func, node.args, node.keywords
    if not isinstance(head, ast.Name):
        found = f"{_name_kind(head)} {source.quote(head)} {source.place(head.col_offset)}"
        raise ConfigError(f"found {found}, expected the name of a preset: {list_presets()}")
    reference = source.references.get(head.col_offset)
    name = head.id if reference is None else reference
    if reference is not None:
        function: Preset = _load_preset(reference)
    elif name in PRESETS:
        function = PRESETS[name]
    else:
        close = suggest(name, PRESETS)
        hint = f"{close} {list_presets().capitalize()}" if close.endswith("?") else list_presets()
        raise ConfigError(f"unknown algorithm {name!r}: {hint} ({source.place(head.col_offset)})")
    hints = _read_hints(function)
    arguments = {
        parameter: _parse_argument(source, name, parameter, hints.get(parameter, Any), value, depth)
        for parameter, value in _bind(source, name, function, positional, keywords).items()
    }
    required = [key for key, p in _parameters(function).items() if p.default is inspect.Parameter.empty and key != "max_tokens"]
    missing = next((key for key in required if key not in arguments), None)
    if missing is not None:
        example = f"{name}(grpo())" if hints.get(missing) is Algorithm else f"{name}({missing}=...)"
        raise ConfigError(
            f"{name} needs the argument {missing!r} {source.place(node.col_offset)}: write {example}. {_list_arguments(name, function)}"
        )
    return PresetCall(name=name, function=function, arguments=arguments, text=source.cut(node))


def _load_preset(reference: str) -> Preset:
    """The function that a reference names, if it is one that makes algorithms; see the docstring of the module."""
    function, location = load_function(reference), reference.rpartition(":")[0]
    advice = "write it with def and the return annotation -> Algorithm"
    if not isinstance(function, types.FunctionType):
        kind = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{reference} is {kind}, expected a Python function that makes an algorithm: {advice}")
    from_file = location.endswith(".py") and Path(inspect.unwrap(function).__code__.co_filename).resolve() == Path(location).resolve()
    if not (from_file or _returns_algorithm(function)):
        raise ConfigError(f"{reference} does not say that it returns an Algorithm, and is not called: {advice}")
    return function


def _bind(source: _Source, name: str, function: Preset, positional: list[ast.expr], keywords: list[ast.keyword]) -> dict[str, ast.expr]:
    """Each argument by the name of its parameter, as Python assigns them."""
    parameters = _parameters(function)

    def refuse(what: str, node: ast.expr | ast.keyword) -> ConfigError:
        return ConfigError(f"{name} was given {what}, {source.place(node.col_offset)}. {_list_arguments(name, function)}")

    for node in positional:
        if isinstance(node, ast.Starred):
            raise refuse("an argument with a star", node)
    if len(positional) > len(parameters):
        extra = positional[len(parameters)]
        raise refuse(f"one argument too many, {source.quote(extra)}", extra)
    bound = dict(zip(parameters, positional, strict=False))
    for keyword in keywords:
        if keyword.arg is None:
            raise refuse("arguments with two stars", keyword)
        if keyword.arg in bound:
            raise refuse(f"the argument {keyword.arg!r} twice", keyword)
        if keyword.arg not in parameters and not _takes_any_keyword(function):
            close = suggest(keyword.arg, parameters)
            raise refuse(f"an unknown argument {keyword.arg!r}" + (f" ({close})" if close.endswith("?") else ""), keyword)
        bound[keyword.arg] = keyword.value
    return bound


def _parse_argument(source: _Source, name: str, parameter: str, hint: Any, node: ast.expr, depth: int) -> Any:
    """A literal of the parameter's type, or an algorithm where it takes one."""
    expected = _name_type(hint)
    where = f"{source.place(node.col_offset)} as {parameter!r} of {name}"
    options = _list_options(hint)
    if Algorithm in options and isinstance(node, ast.Name | ast.Call):
        return _parse_call(source, node, depth + 1)
    for kind, functions in FUNCTIONS:
        if isinstance(node, ast.Name) and kind in options and node.id in functions:
            return functions[node.id]
    if isinstance(node, ast.Name):
        quote = " Strings stand in quotes." if expected is None or "string" in expected or "'" in expected else ""
        raise ConfigError(f"found the name {node.id!r} {where}, expected {expected or 'a literal'}.{quote}")
    sign, operand = 1, node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        sign, operand = (-1 if isinstance(node.op, ast.USub) else 1), node.operand
    value = operand.value if isinstance(operand, ast.Constant) else ...
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not _is_finite(value):
            raise ConfigError(f"found {source.quote(node)} {where}, expected a finite number")
        value = sign * value
    elif operand is not node or not isinstance(value, str | bool | None):
        raise ConfigError(
            f"found {_name_kind(node)} {source.quote(node)} {where}, expected {expected or 'a literal'}: "
            "only numbers, strings, True, False and None are read, nothing is evaluated"
        )
    for option in options:
        fits, converted = _convert(value, option)
        if fits:
            return converted
    raise ConfigError(f"found {value!r} {where}, expected {expected}")


def _list_arguments(name: str, function: Preset) -> str:
    shown = [key if p.default is inspect.Parameter.empty else f"{key}={_show(p.default)}" for key, p in _parameters(function).items()]
    return f"It takes {', '.join(shown)}" if shown else f"It takes no arguments: write {name}()"


def _parameters(function: Preset) -> dict[str, inspect.Parameter]:
    """What can be given by name; nothing for a function that does not say."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of extension modules
        return {}
    return {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _takes_any_keyword(function: Preset) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()) if _parameters(function) else False


def _list_options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a type itself otherwise."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _convert(value: object, hint: Any) -> tuple[bool, Any]:
    """Whether a literal is of a type, and the literal as this type."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return (True, float(value)) if whole or isinstance(value, float) else (False, None)  # type: ignore[arg-type]
    if hint is int:
        return whole, value
    if hint in (bool, str):
        return isinstance(value, hint), value
    if hint in (None, types.NoneType):
        return value is None, None
    if typing.get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint)), value
    return hint is Any, value


def _name_type(hint: Any) -> str | None:
    """A type in words; None for one that says nothing."""
    names = {
        float: "a number",
        int: "a whole number",
        bool: "True or False",
        str: "a string in quotes",
        Algorithm: "an algorithm, as grpo()",
    }
    words: list[str] = []
    for option in _list_options(hint):
        if typing.get_origin(option) is Literal:
            words += map(repr, typing.get_args(option))
        elif option in (None, types.NoneType):
            words.append("None")
        elif any(option == kind for kind, _ in FUNCTIONS):
            words.append(f"one of {', '.join(name for kind, functions in FUNCTIONS if kind == option for name in functions)}")
        elif option in names:
            words.append(names[option])
        elif option is not Any:
            words.append("what cannot be written here (make a function of it and name it as module:function)")
    return " or ".join(words) or None


def _name_kind(node: ast.expr) -> str:
    """What stands in a place, in a word or two."""
    words: dict[type[ast.expr], str] = {
        ast.Attribute: "an attribute", ast.Subscript: "a subscript", ast.Lambda: "a lambda", ast.Call: "a call", ast.Name: "a name",
        ast.Constant: "a literal", ast.BinOp: "arithmetic", ast.UnaryOp: "arithmetic", ast.Starred: "a star", ast.JoinedStr: "an f-string",
        ast.ListComp: "a comprehension", ast.SetComp: "a comprehension", ast.DictComp: "a comprehension",
        ast.GeneratorExp: "a comprehension", ast.List: "a list", ast.Tuple: "a tuple", ast.Dict: "a dictionary", ast.Set: "a set",
        ast.NamedExpr: "an assignment",
    }  # fmt: skip
    return words.get(type(node), "an expression")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number beyond all floats
        return False


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
