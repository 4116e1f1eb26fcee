"""Test process, separated from the program under test: each use of the program's names is a request to the program's process.

Tests run here as they are written. If they use a name of the program, the answer comes from a list that the caller got from that other
process. If there is no answer yet, the request is recorded and the tests go on with a guess, so that later requests become known, too. The
caller has the requests answered, in order and anew, and calls again until the tests ran to their end without a guess. The verdict is thus
made by the tests' code on plain data, in a process in which the program never ran. Loaded inside of sandboxes only.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import io
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

from rollouts.rewards.code.unit_tests import write_literal
from rollouts.rewards.code.values import decode, encode
from rollouts.sandbox.inside.worker import execute

MOST_REQUESTS = 2000  # requests of all tests together
MOST_AHEAD = 200  # requests of one run after the first unanswered one
MOST_GUESSES = 20_000  # uses of guesses in a run; bounds loops that only a value ends
TAKEN_AT_ONCE = 64  # first number of items taken from an iterator
_NEVER_RAISED = ("StopIteration", "StopAsyncIteration", "GeneratorExit")  # they would silently end a loop of the test


def judge_tests(payload: dict[str, Any]) -> dict[str, Any]:
    """Run tests.

    Args:
        payload: "setup", source text in front of the tests; "tests", each an "expression" or "source" text; "names", the program's names
            in them, and "exceptions", the names among these that are caught; "ambient", import places of other names; "requests" and
            "answers" so far; "most_text", most characters of a value.

    Returns: {"requests": ...} to be answered; or "outcomes" of the tests: {"value": literal text}, {} for a test that passes, or {"error"}.
    """
    log = _Log(payload["requests"], payload["answers"])
    texts = [payload["setup"], *(test.get("source", "") for test in payload["tests"])]
    log.sources = "\n".join([*texts, *(f"({test['expression']})" for test in payload["tests"] if "expression" in test)])
    space = _Names(log, payload["names"], payload["exceptions"], payload["ambient"])
    setup = _attempt(lambda: _execute(payload["setup"], space, log))
    outcomes = [_attempt(lambda test=test: _run(test, space, log, payload["most_text"])) for test in payload["tests"]]
    if log.is_incomplete:
        return {"requests": log.requests}
    return {"outcomes": outcomes if "error" not in setup else [setup] * len(outcomes)}


class _Undecided(BaseException):
    """The test asks for a verdict that only the program's code could give, in its own favor. No test expects or catches it."""


class _Stop(BaseException):
    """No further guess is possible here."""


class _Outcome:
    """Outcome of a test, in JSON."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def set_error(self, error: BaseException) -> None:
        """Record the test's exception."""
        self.content = {"error": f"{type(error).__name__.strip('_')}: {error}"[:500], "undecided": isinstance(error, _Undecided)}


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    outcome = _Outcome()
    try:
        outcome.content = work()
    except BaseException as error:  # SystemExit and the program's exceptions, too
        outcome.set_error(error)
    return outcome.content


def _run(test: dict[str, str], space: dict[str, Any], log: _Log, most_text: int) -> dict[str, Any]:
    if "expression" in test:
        execute(f"__value__ = ({test['expression'].strip()}\n)", space)
        value = space.pop("__value__")
        if isinstance(value, _Object):
            raise TypeError(f"the value is {value!r}, no plain data")
        return {"value": write_literal(value)[:most_text]}
    return _execute(test["source"], space, log)


def _execute(source: str, space: dict[str, Any], log: _Log) -> dict[str, Any]:
    """Execute tests, and the unittest cases that they define."""
    tree = ast.fix_missing_locations(_Asserts().visit(ast.parse(source)))
    before = set(space)
    space["__check__"] = log.check
    execute(tree, space)
    cases = [value for name, value in list(space.items()) if name not in before and _is_case(value)]
    for case in cases:
        suite, printed = unittest.defaultTestLoader.loadTestsFromTestCase(case), io.StringIO()
        result = unittest.TextTestRunner(stream=printed).run(suite)
        problems = [text.strip().splitlines()[-1] for _, text in (*result.errors, *result.failures)]
        if not result.wasSuccessful() or result.testsRun == 0:
            raise AssertionError(f"{case.__name__}: {'; '.join(problems) or 'no test was run'}")
    return {}


def _is_case(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, unittest.TestCase)


class _Asserts(ast.NodeTransformer):
    """Turn `assert x, y` into `if not x: __check__("x", y)`, so that a failure after a guess does not end the test."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        text = ast.Constant(ast.unparse(node.test)[:300])
        message = [] if node.msg is None else [node.msg]
        call = ast.Expr(ast.Call(ast.Name("__check__", ast.Load()), [text, *message], []))
        return ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), [call], []), node)


class _Names(dict[str, Any]):
    """Namespace of the tests; the program's names are requested."""

    def __init__(self, log: _Log, names: Sequence[str], exceptions: Sequence[str], ambient: dict[str, str]) -> None:
        super().__init__({"__name__": "__test__", "__builtins__": builtins})
        self._log, self._asked, self._ambient = log, frozenset(names) - frozenset(exceptions), ambient
        for name in exceptions:
            self[name] = log.exceptions[name] = type(name, (Exception,), {})

    def __missing__(self, name: str) -> Any:
        if name in self._asked:
            self[name] = self._log.ask("name", name)
            return self[name]
        if name in self._ambient:
            module, _, attribute = self._ambient[name].partition(":")
            self[name] = getattr(importlib.import_module(module), attribute) if attribute else importlib.import_module(module)
            return self[name]
        raise KeyError(name)


class _Log:
    """Requests of this run, in order, and the known answers."""

    def __init__(self, requests: list[Any], answers: list[Any]) -> None:
        self._known, self._answers = requests, answers
        self.requests: list[list[Any]] = []
        self.is_incomplete = False
        self.exceptions: dict[str, type[BaseException]] = {}
        self.sources = ""
        self._num_guesses = self._first_unknown = 0

    def ask(self, kind: str, *parts: Any) -> Any:
        """Return the answer to a request, or a guess; raise an exception of the program."""
        number = len(self.requests)
        if number >= MOST_REQUESTS:
            raise _Stop(f"the tests ask for more than {MOST_REQUESTS} values of the program")
        request = [kind, *self._encode_parts(kind, parts)]
        if self.is_incomplete and number - self._first_unknown > MOST_AHEAD:
            raise _Stop("enough is guessed for once")
        self.requests.append(request)
        known = not self.is_incomplete and number < len(self._answers) and self._resolve(self._known[number]) == self._resolve(request)
        if not known:
            self._first_unknown = self._first_unknown if self.is_incomplete else number
            self.is_incomplete = True
            return _Guess(self, number)
        answer = self._answers[number]
        if "error" in answer:
            raise self._create_error(answer["error"])
        for place, data in answer.get("changed", ()):
            _change(parts[1][place] if isinstance(place, int) else parts[2][place], self._decode(data))
        return self._decode(answer["value"])

    def check(self, text: str, message: Any = None) -> None:
        """Handle an assertion that does not hold."""
        if not self.is_incomplete:
            raise AssertionError(f"{text} does not hold" + ("" if message is None else f": {message}"))

    def use_guess(self) -> None:
        """Count a use of a guess."""
        self._num_guesses += 1
        if self._num_guesses > MOST_GUESSES:
            raise _Stop("a loop that goes on for ever without an answer")

    def _encode_parts(self, kind: str, parts: tuple[Any, ...]) -> list[Any]:
        if kind == "call":
            return [self._encode(parts[0]), [self._encode(x) for x in parts[1]], {key: self._encode(x) for key, x in parts[2].items()}]
        return list(parts) if kind == "name" else [self._encode(part) for part in parts]

    def _encode(self, value: Any) -> Any:
        return encode(value, self._name)

    def _name(self, value: Any) -> dict[str, Any]:
        if isinstance(value, _Guess):
            if value.remote_number is None:
                raise _Stop("a value made of a guess is not known")
            return {"result": value.remote_number}
        if isinstance(value, _Object):
            return {"object": value.remote_number}
        module, name = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", "")
        if module != "__test__" and "." not in name and getattr(importlib.import_module(module), name or " ", None) is value:
            return {"global": f"{module}.{name}"}
        if isinstance(value, types.FunctionType) and value.__closure__ is None:
            source = self._find_source(value)
            if source is not None:
                return {"code": source}
        raise _Undecided(f"an argument of the program is no plain data: {value!r:.100}")

    def _find_source(self, function: types.FunctionType) -> str | None:
        """Return the source of a test's function that uses only builtins, renamed to `value`; None if there is none."""
        code = function.__code__
        for node in ast.walk(ast.parse(self.sources)):
            if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
                renamed = copy.deepcopy(node)
                renamed.name, renamed.decorator_list = "value", []
                text = ast.unparse(renamed)
            elif isinstance(node, ast.Lambda):
                text = f"value = {ast.unparse(node)}"
            else:
                continue
            space: dict[str, Any] = {}
            execute(text, space)
            other = space["value"].__code__
            if (other.co_code, other.co_consts, other.co_names) == (code.co_code, code.co_consts, code.co_names):
                known = all(hasattr(builtins, name) for name in _globals_of(code))
                return text if known and not function.__defaults__ else None
        return None

    def _decode(self, data: Any) -> Any:
        return decode(data, self._find)

    def _find(self, key: str, content: Any) -> Any:
        if key == "object" and isinstance(content, int):
            return _Object(self, content)
        raise ValueError(f"{key} names nothing")

    def _resolve(self, data: Any) -> Any:
        """Return a request with answers in place of references to them."""
        if isinstance(data, dict):
            found = cast("dict[str, Any]", data)
            if set(found) == {"result"} and found["result"] < len(self._answers) and "value" in self._answers[found["result"]]:
                return self._answers[found["result"]]["value"]
            return {key: self._resolve(value) for key, value in found.items()}
        return [self._resolve(item) for item in cast("list[Any]", data)] if isinstance(data, list) else data

    def _create_error(self, error: dict[str, Any]) -> BaseException:
        """Recreate the program's exception by its name: one of Python's, or of the tests."""
        text = error["text"]
        for name in error["kinds"]:
            if name in _NEVER_RAISED:
                return RuntimeError(f"the program raised {name}")
            kind = self.exceptions.get(name) or getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                try:
                    return kind(text)
                except TypeError:  # an exception with several arguments, such as UnicodeDecodeError
                    continue
        return Exception(text)


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the names that a function may find outside of itself; attributes count as well."""
    inner = [_globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    attributes = {name for name in code.co_names if any(hasattr(kind, name) for kind in (str, list, dict, set, int, float, tuple))}
    return (set(code.co_names) - attributes).union(*inner)


def _change(value: Any, new: Any) -> None:
    """Give a container the content of another one, as the program changed it."""
    if isinstance(value, (list, bytearray)):
        value[:] = new
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(new)
    elif hasattr(value, "clear") and hasattr(value, "extend"):
        value.clear()
        value.extend(new)


class _Object:
    """Proxy of an object of the program that is no plain data. Tests may ask for its parts, never for a verdict."""

    __slots__ = ("remote_log", "remote_number")

    def __init__(self, log: _Log, number: int | None) -> None:
        object.__setattr__(self, "remote_log", log)
        object.__setattr__(self, "remote_number", number)

    def remote_ask(self, kind: str, *parts: Any) -> Any:
        return self.remote_log.ask(kind, self, *parts)

    def __getattr__(self, name: str) -> Any:
        if name in ("__iter__", "__next__", "__len__", "__array__", "__array_interface__", "__array_struct__", "__float__", "__index__"):
            raise AttributeError(name)
        return self.remote_ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.remote_ask("setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote_ask("call", args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.remote_ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.remote_ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self.remote_ask("delitem", key)

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: object) -> None:
        self.__getattr__("__exit__")(None, None, None)

    def __iter__(self) -> Iterator[Any]:
        iterator, size = self.remote_ask("iter"), TAKEN_AT_ONCE
        while True:
            items = self.remote_log.ask("take", iterator, size)
            if isinstance(items, _Guess):
                return
            yield from items
            if len(items) < size:
                return
            size *= 4

    def __reversed__(self) -> Iterator[Any]:
        return iter(self.remote_ask("reversed"))

    def __next__(self) -> Any:
        items = self.remote_ask("take", 1)
        if isinstance(items, _Guess):
            return items[0]
        if not items:
            raise StopIteration
        return items[0]

    def __len__(self) -> int:
        return _expect(self.remote_ask("len"), int)

    def __str__(self) -> str:
        return _expect(self.remote_ask("str"), str)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        return f"<object {self.remote_number} of the program>"

    def __int__(self) -> int:
        return _expect(self.remote_ask("int"), int)

    def __index__(self) -> int:
        return _expect(self.remote_ask("index"), int)

    def __float__(self) -> float:
        return _expect(self.remote_ask("float"), float)

    def __hash__(self) -> int:
        return hash(self.remote_number)

    def __bool__(self) -> bool:
        raise _Undecided("whether an object of the program is true, it alone would say")

    def __eq__(self, other: object) -> Any:
        return self.remote_compare("eq", other) if isinstance(other, _Object) else False

    def __ne__(self, other: object) -> Any:
        return self.remote_compare("ne", other) if isinstance(other, _Object) else True

    def __lt__(self, other: Any) -> Any:
        return self.remote_compare("lt", other)

    def __le__(self, other: Any) -> Any:
        return self.remote_compare("le", other)

    def __gt__(self, other: Any) -> Any:
        return self.remote_compare("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self.remote_compare("ge", other)

    def remote_compare(self, kind: str, other: Any) -> Any:
        """Let the program compare two of its objects. It never compares one with data, which would reveal the expected value."""
        if not isinstance(other, _Object):
            raise _Undecided(f"an object of the program is compared with {type(other).__name__}")
        return self.remote_ask(kind, other)

    def __instancecheck__(self, instance: Any) -> NoReturn:
        raise _Undecided("the program alone would decide whether a value is an instance of its class")

    def __subclasscheck__(self, subclass: Any) -> NoReturn:
        raise _Undecided("the program alone would decide whether a class is a subclass of its class")


def _expect(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise _Undecided(f"the program gave {type(value).__name__} where {kind.__name__} is needed")
    return value


class _Guess(_Object):
    """The value of an unanswered request. It may be anything: on any use the test goes on."""

    __slots__ = ()

    def remote_make(self, *_: Any) -> _Guess:
        self.remote_log.use_guess()
        return _Guess(self.remote_log, None)

    def remote_ask(self, kind: str, *parts: Any) -> Any:
        self.remote_log.use_guess()
        return _Guess(self.remote_log, None) if self.remote_number is None else self.remote_log.ask(kind, self, *parts)

    def remote_yes(self, *_: Any) -> bool:
        self.remote_log.use_guess()
        return True

    def __iter__(self) -> Iterator[Any]:
        self.remote_log.use_guess()
        return iter(())

    def __next__(self) -> Any:
        self.remote_log.use_guess()
        return self.remote_ask("take", 1)[0]

    def __len__(self) -> int:
        self.remote_log.use_guess()
        return 1

    def __str__(self) -> str:
        self.remote_log.use_guess()
        return ""

    def __int__(self) -> int:
        self.remote_log.use_guess()
        return 1

    def __index__(self) -> int:
        self.remote_log.use_guess()
        return 1

    def __float__(self) -> float:
        self.remote_log.use_guess()
        return 1.0

    __hash__ = object.__hash__
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __instancecheck__ = remote_yes  # type: ignore[assignment]


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"


def _create_operator(name: str, reverse: bool) -> Callable[[Any, Any], Any]:
    kind = {"and": "and_", "or": "or_"}.get(name, name)

    def operate(self: _Object, other: Any) -> Any:
        if isinstance(self, _Guess) or isinstance(other, _Guess):
            return (self if isinstance(self, _Guess) else other).remote_make()
        if not isinstance(other, _Object):
            raise _Undecided(f"{name} of an object of the program and {type(other).__name__}: the program would learn the expected value")
        return other.remote_ask(kind, self) if reverse else self.remote_ask(kind, other)

    return operate


def _create_unary(name: str) -> Callable[..., Any]:
    def operate(self: _Object, *_: Any) -> Any:
        return self.remote_make() if isinstance(self, _Guess) else self.remote_ask(name)

    return operate


for _name in _BINARY.split():
    setattr(_Object, f"__{_name}__", _create_operator(_name, False))
    setattr(_Object, f"__r{_name}__", _create_operator(_name, True))
for _name in ("neg", "pos", "abs", "invert", "round"):
    setattr(_Object, f"__{_name}__", _create_unary(_name))
