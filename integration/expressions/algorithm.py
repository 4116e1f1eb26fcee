"""--rl.algorithm: an expression of composed presets, and its evaluation to an Algorithm.

    grpo                                        a preset with its defaults
    dapo(clip_high=0.28)                        with arguments: numbers, strings, True, False, None
    decoupled(dapo(clip_high=0.28), cap=5.0)    a preset around a preset
    my_module:my_algorithm                      a user's function that returns an Algorithm; also path/to/file.py:my_algorithm
    truncated(my_module:my_algorithm(beta=0.1))

The text is parsed, never passed to eval: only preset names, references to functions, calls of both, literals and, for presets that take
one, the name of a KL estimator (kl=k2), an interpolation (approximate=interpolate_log_probs), a combination (combine=interpolate) or a loss
of pairs (loss=ipo) are valid. A reference imports its module, as `import` does, so name only modules you trust. Only functions that create
algorithms are called: written in Python, and either with the return annotation `-> Algorithm` or defined in the .py file that the reference
names. os:system, builtins:eval and the like are refused.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union

import torch

from rollouts.algorithms import covariance, estimators
from rollouts.algorithms import presets as algorithms
from rollouts.algorithms.anchors import Combine, add_weighted, interpolate
from rollouts.algorithms.kl import KLEstimator, abs_kl, k1, k2, k3, straight_through
from rollouts.algorithms.losses import KLTerm
from rollouts.algorithms.preference_objectives import PairObjective, cdpo, dpo, ipo, orpo, robust_dpo, simpo, slic
from rollouts.algorithms.presets import Chain
from rollouts.algorithms.proximal import Interpolation, interpolate_log_probs, interpolate_probs
from rollouts.config_files import suggest
from rollouts.errors import ConfigError, DataError, locate_error
from rollouts.rewards.answers import load_function
from rollouts.types import Algorithm, RewardComponents, TrainBatch, Turns

Preset = Callable[..., Algorithm]


def find_presets() -> dict[str, Preset]:
    """Return the public functions of rollouts/algorithms/presets.py that return an Algorithm, by name, in the order of the file."""
    found = [
        function
        for name, function in inspect.getmembers(algorithms, inspect.isfunction)
        if function.__module__ == algorithms.__name__ and not name.startswith("_") and _returns_algorithm(function)
    ]
    return {function.__name__: function for function in sorted(found, key=lambda function: function.__code__.co_firstlineno)}


def _read_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (TypeError, NameError, AttributeError):  # annotations of a user's function may be anything
        return {}


def _returns_algorithm(function: types.FunctionType) -> bool:
    """Whether the return annotation of a function is Algorithm; an annotation that does not resolve counts by its name."""
    annotation = _read_hints(function).get("return", function.__annotations__.get("return"))
    return annotation is Algorithm or (isinstance(annotation, str) and annotation.rpartition(".")[2] == "Algorithm")


PRESETS: Mapping[str, Preset] = find_presets() | {"gae": algorithms.ppo}  # gae: verl's name of ppo, by its estimator
KL_ESTIMATORS: Mapping[str, KLEstimator] = {  # for kl=k2
    **{estimator.__name__: estimator for estimator in (k1, abs_kl, k2, k3)},
    **{f"{estimator.__name__}_straight_through": straight_through(estimator) for estimator in (k1, k3)},
}
INTERPOLATIONS: Mapping[str, Interpolation] = {f.__name__: f for f in (interpolate_log_probs, interpolate_probs)}  # for approximate=...
COMBINATIONS: Mapping[str, Combine] = {f.__name__: f for f in (add_weighted, interpolate)}  # for combine=...
PAIR_OBJECTIVES: Mapping[str, PairObjective] = {  # for loss=ipo, by the names of --preference.loss
    "dpo": dpo, "cdpo": cdpo, "robust": robust_dpo, "ipo": ipo, "slic": slic, "simpo": simpo, "orpo": orpo,
}  # fmt: skip
FUNCTIONS: tuple[tuple[Any, Mapping[str, Any]], ...] = (  # functions valid as arguments, by type
    (KLEstimator, KL_ESTIMATORS),
    (Interpolation, INTERPOLATIONS),
    (Combine, COMBINATIONS),
    (PairObjective, PAIR_OBJECTIVES),
)
MAX_LENGTH = 2000  # characters of an expression
MAX_DEPTH = 8  # nested presets
# a drive, a path or a dotted module, a colon and a name; strings come first, so that quoted text is no reference
WHOLE_REFERENCE = re.compile(r"(?P<string>(?!))?[^()'\"]+:[^()'\":]*")
REFERENCE = re.compile(r"""(?P<string>'[^']*'|"[^"]*")|(?:\b[A-Za-z]:(?=[\\/]))?[\w.~/\\-]+:[A-Za-z_]\w*""")


@dataclass(frozen=True)
class Language:
    """The functions that an expression may call, and their names in messages."""

    what: str  # name of the expression, for messages
    names: Mapping[str, Callable[..., Any]]  # functions callable by name
    load: Callable[[str], Callable[..., Any]]  # loads the function of a reference, if it may be called
    example: str  # example expression, for messages
    num_filled: int = 0  # leading parameters of each function that are not arguments of the expression
    budget: str | None = None  # parameter filled with the token budget if the expression does not give it
    hidden: str | None = None  # parameter of the functions in `names` that the caller fills, and no expression can give

    def list_names(self) -> str:
        """Return the known names, for messages."""
        return f"known are {', '.join(sorted(self.names))}, or module:function"

    def list_parameters(self, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
        """Return the parameters that an expression can give, by name; none for a function without a signature."""
        hides = self.hidden if function in self.names.values() else None
        return {name: p for name, p in _parameters(function, self.num_filled).items() if name != hides}


@dataclass(frozen=True)
class PresetCall:
    """A parsed expression: a function and its arguments, which may be expressions themselves."""

    name: str  # name of a preset, or reference to a function
    function: Callable[..., Any]
    arguments: Mapping[str, Any]  # arguments given, each a literal or a PresetCall
    text: str  # the text as written by the user or by write_call
    num_filled: int = 0  # leading parameters of the function that are not arguments of the expression


def resolve_algorithm(expression: str, max_tokens: int) -> Algorithm:
    """Create the algorithm of an expression.

    Args:
        max_tokens: the token budget of a response, the default of preset arguments of this name.

    Raises: ConfigError with the position in the expression, the value found and advice.
    """
    return create_algorithm(parse_algorithm(expression), max_tokens, expression)


def parse_algorithm(expression: str) -> PresetCall:
    """Parse an expression and check the names and types of its arguments. Imports the modules of references; creates no Algorithm.

    Raises: ConfigError.
    """
    return parse_expression(expression, ALGORITHMS)


def parse_expression(expression: str, language: Language) -> PresetCall:
    """Parse an expression of a language and check the names and types of its arguments. Imports the modules of references, calls nothing.

    Raises: ConfigError.
    """
    what = language.what
    if len(expression) > MAX_LENGTH:
        raise ConfigError(f"the {what} has {len(expression):,} characters, expected at most {MAX_LENGTH:,}: write it as module:function")
    text = expression.strip().replace("\n", " ")  # one line, so that a column is a position
    if not text:
        raise ConfigError(f"the {what} is {expression!r}, expected an expression such as {language.example}: {language.list_names()}")
    references: dict[int, str] = {}

    def hide(match: re.Match[str]) -> str:
        if match["string"] is not None:
            return match[0]
        references[len(text[: match.start()].encode())] = match[0]
        return "_" * len(match[0].encode())  # a placeholder of equal length, to keep columns

    source = _Source(text, references, language)
    # a path without arguments may contain anything, spaces included
    pattern = WHOLE_REFERENCE if WHOLE_REFERENCE.fullmatch(text) else REFERENCE
    hidden = pattern.sub(hide, text)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(hidden, mode="eval")
    except SyntaxError as error:
        raise ConfigError(
            f"cannot read the {what} {source.show()}: {error.msg} at column {max(1, error.offset or 1)}. Write it as {language.example}"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"cannot read the {what} {source.show()}: {reason}. Write it as {language.example}") from error
    return _parse_call(source, tree.body, depth=1)


def create_algorithm(call: PresetCall, max_tokens: int, expression: str | None = None) -> Algorithm:
    """Evaluate a parsed expression, inner calls first. Raises ConfigError if a preset refuses its arguments."""
    arguments = {
        name: create_algorithm(value, max_tokens, expression or call.text) if isinstance(value, PresetCall) else value
        for name, value in _complete(call, max_tokens).items()
    }
    where = "" if expression in (None, call.text) else f" (in {expression!r})"
    try:
        algorithm = typing.cast("object", call.function(**arguments))
    except ConfigError as error:
        raise ConfigError(f"{call.text}: {error}{where}") from error
    except (Exception, SystemExit) as error:  # user code may raise anything: name its source
        if call.name in PRESETS:
            raise
        raise ConfigError(f"{call.text} raised {type(error).__name__}: {error} ({locate_error(error)}){where}") from error
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"{call.text} returned a {type(algorithm).__name__}, expected an Algorithm{where}")
    return algorithm


def describe_call(call: PresetCall, max_tokens: int | None = None) -> str:
    """Return the expression with all arguments, defaults included: dapo -> dapo(clip_low=0.2, clip_high=0.28, epsilon=0.0001, dual=None).

    Args:
        max_tokens: token budget; None = an expression without one.
    """
    given = _complete(call, max_tokens)
    parameters = _parameters(call.function, call.num_filled)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    order = [*parameters, *given]
    values = {name: given.get(name, defaults.get(name)) for name in order if name in given or name in defaults}
    shown = (
        f"{key}={describe_call(value, max_tokens) if isinstance(value, PresetCall) else _show(value)}" for key, value in values.items()
    )
    return f"{call.name}({', '.join(shown)})"


def write_call(call: PresetCall) -> str:
    """Return the text of a call with the given arguments only."""
    given = {name: value.text if isinstance(value, PresetCall) else _show(value) for name, value in call.arguments.items()}
    return f"{call.name}({', '.join(text if name == 'algorithm' else f'{name}={text}' for name, text in given.items())})"


def _show(value: object) -> str:
    """Return a value as written in an expression: functions by their names."""
    return next((name for _, functions in FUNCTIONS for name, function in functions.items() if function is value), repr(value))


def _complete(call: PresetCall, max_tokens: int | None) -> dict[str, Any]:
    """Return the arguments, completed by the token budget if the function takes one."""
    budget = {"max_tokens": max_tokens} if max_tokens is not None and "max_tokens" in _parameters(call.function) else {}
    return budget | dict(call.arguments)


@dataclass(frozen=True)
class _Source:
    """The parsed text, for positions in messages."""

    text: str
    references: Mapping[int, str]  # by the byte where each begins
    language: Language

    def show(self) -> str:
        return repr(_shorten(self.text, 200))

    def cut(self, node: ast.expr) -> str:
        return self.text.encode()[node.col_offset : node.end_col_offset].decode()

    def quote(self, node: ast.expr) -> str:
        return repr(_shorten(self.cut(node), 60))

    def place(self, offset: int) -> str:
        return f"at column {len(self.text.encode()[:offset].decode()) + 1} of {self.show()}"


def _parse_call(source: _Source, node: ast.expr, depth: int) -> PresetCall:
    language = source.language
    if depth > MAX_DEPTH:
        raise ConfigError(
            f"the {language.what} nests more than {MAX_DEPTH} deep {source.place(node.col_offset)}: write it as module:function"
        )
    positional: list[ast.expr] = []
    keywords: list[ast.keyword] = []
    head = node
    if isinstance(node, ast.Call):
        head, positional, keywords = node.func, node.args, node.keywords
    if not isinstance(head, ast.Name):
        found = f"{_name_kind(head)} {source.quote(head)} {source.place(head.col_offset)}"
        raise ConfigError(f"found {found}, expected the name of a preset: {language.list_names()}")
    reference = source.references.get(head.col_offset)
    name = head.id if reference is None else reference
    if reference is not None:
        try:
            function = language.load(reference)
        except ConfigError as error:
            raise ConfigError(f"the {language.what} is {reference!r}: {error}") from error
    elif name in language.names:
        function = language.names[name]
    else:
        close, known = suggest(name, language.names), language.list_names()
        hint = f"{close} {known.capitalize()}" if close.endswith("?") else known
        raise ConfigError(f"unknown {language.what} {name!r}: {hint} ({source.place(head.col_offset)})")
    hints = _read_hints(function)
    arguments = {
        parameter: _parse_argument(source, name, parameter, hints.get(parameter, Any), value, depth)
        for parameter, value in _bind(source, name, function, positional, keywords).items()
    }
    parameters = language.list_parameters(function)
    required = [key for key, p in parameters.items() if p.default is inspect.Parameter.empty and key != language.budget]
    missing = next((key for key in required if key not in arguments), None)
    if missing is not None:
        example = f"{name}(grpo())" if hints.get(missing) is Algorithm else f"{name}({missing}=...)"
        raise ConfigError(
            f"{name} needs the argument {missing!r} {source.place(node.col_offset)}: write {example}. {_list_arguments(name, parameters)}"
        )
    return PresetCall(name=name, function=function, arguments=arguments, text=source.cut(node), num_filled=language.num_filled)


def _load_preset(reference: str) -> Preset:
    """Load the function of a reference, if it creates algorithms; see the module docstring."""
    function, location = load_function(reference), reference.rpartition(":")[0]
    advice = "write it with def and the return annotation -> Algorithm"
    if not isinstance(function, types.FunctionType):
        kind = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{reference} is {kind}, expected a Python function that creates an algorithm: {advice}")
    from_file = location.endswith(".py") and Path(inspect.unwrap(function).__code__.co_filename).resolve() == Path(location).resolve()
    if not (from_file or _returns_algorithm(function)):
        raise ConfigError(f"{reference} has no return annotation Algorithm, so it is not called: {advice}")
    return function


ALGORITHMS = Language("algorithm", PRESETS, _load_preset, example="grpo(kl_coef=0.1)", budget="max_tokens")


def _bind(
    source: _Source, name: str, function: Callable[..., Any], positional: list[ast.expr], keywords: list[ast.keyword]
) -> dict[str, ast.expr]:
    """Return the arguments by parameter name, bound as Python binds them."""
    parameters = source.language.list_parameters(function)

    def refuse(what: str, node: ast.expr | ast.keyword) -> ConfigError:
        return ConfigError(f"{name} was given {what}, {source.place(node.col_offset)}. {_list_arguments(name, parameters)}")

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
    """Parse a literal of the parameter's type, or an algorithm for a parameter that takes one."""
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


def _list_arguments(name: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    shown = [key if p.default is inspect.Parameter.empty else f"{key}={_show(p.default)}" for key, p in parameters.items()]
    return f"It takes {', '.join(shown)}" if shown else f"It takes no arguments: write {name}()"


def _parameters(function: Callable[..., Any], num_filled: int = 0) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name, without the first num_filled; none for a function without a signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of extension modules
        return {}
    own = list(parameters.items())[num_filled:]
    return {name: p for name, p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _takes_any_keyword(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()) if _parameters(function) else False


def _list_options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _convert(value: object, hint: Any) -> tuple[bool, Any]:
    """Return whether a literal is of a type, and the literal converted to it."""
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
    """Return the name of a type for messages; None for an uninformative type."""
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
    """Return the kind of a syntax node, in a word or two."""
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
    except OverflowError:  # an integer beyond the range of floats
        return False


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def find_kl_coefs(algorithm: Algorithm) -> dict[str, list[float]]:
    """Return the non-zero coefficients of an algorithm's KL terms, by place: "in the reward" (estimate) and "in the loss".

    Finds nothing in functions other than functools.partial, such as closures.
    """
    places = {"in the reward": algorithm.estimate, "in the loss": algorithm.loss}
    found = {place: [coef for keywords in _find_keywords(part) for coef in _read_kl_coefs(keywords)] for place, part in places.items()}
    return {place: coefficients for place, coefficients in found.items() if coefficients}


def _read_kl_coefs(keywords: Mapping[str, Any]) -> list[float]:
    """The coefficients other than 0 in the keywords of one function: of a penalty (kl_coef) and of a KLTerm."""
    terms = [value.coef for value in keywords.values() if isinstance(value, KLTerm)]
    return [float(coef) for coef in (keywords.get("kl_coef"), *terms) if coef]


def _find_keywords(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the keywords of every partial in a composition."""
    inside: tuple[Any, ...] = part.steps if isinstance(part, Chain) else ()
    if isinstance(part, partial):
        yield part.keywords
        inside = (part.func, *part.args, *part.keywords.values())
    for value in inside:
        yield from _find_keywords(value)


def learns_from_single_samples(algorithm: Algorithm) -> bool:
    """Whether a group of one sample can have a non-zero advantage, tested on two such groups with unequal rewards.

    Also true for a user's estimator, as its use of the group is unknown.
    """
    parts = algorithm.estimate.steps if isinstance(algorithm.estimate, Chain) else (algorithm.estimate,)
    functions = [part.func if isinstance(part, partial) else part for part in parts]
    if any(getattr(function, "__module__", None) not in (estimators.__name__, covariance.__name__) for function in functions):
        return True
    components = tuple(name for keywords in _find_keywords(algorithm.estimate) for name, _ in keywords.get("components", ()))
    equal = torch.full((2, 3), -1.0)
    batch = TrainBatch(
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        lengths=torch.tensor([2, 3]),
        loss_mask=torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 1]),
        trainable=torch.tensor([True, True]),
        values=torch.zeros(2, 3),
        turns=Turns(ids=torch.tensor([[-1, 0, -1], [-1, 0, 0]]), states=torch.tensor([[0], [1]]), rewards=torch.zeros(2, 1)),
        reward_components=RewardComponents(names=components, scores=torch.tensor([[1.0], [0.0]]).expand(2, len(components))),
        **dict.fromkeys(("rollout_log_probs", "old_log_probs", "prox_log_probs", "ref_log_probs"), equal),
    )
    try:
        advantages = algorithm.estimate(batch).advantages
    except DataError:  # it needs other rows in each group, such as ReMax's greedy one
        return True
    return advantages is None or bool((advantages != 0).any())
