"""The expression of --rl.algorithm: what it means, and what it refuses in which words."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.expressions.algorithm import MAX_DEPTH, MAX_LENGTH, PRESETS, describe_call, parse_algorithm, resolve_algorithm
from integration.train import main
from rollouts.algorithms import presets as algorithms
from rollouts.algorithms.anchors import interpolate
from rollouts.algorithms.kl import abs_kl, k2, k3, straight_through
from rollouts.algorithms.proximal import interpolate_probs
from rollouts.errors import ConfigError
from rollouts.types import Algorithm

resolve = partial(resolve_algorithm, max_tokens=8)

OWN = """
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from rollouts.algorithms.presets import grpo
from rollouts.errors import ConfigError
from rollouts.types import Algorithm


def plain():
    return grpo()


def around(algorithm: Algorithm, cap: float | None = 5.0, *, strict: bool = True, level: Literal["token", "sequence"] = "token",
           name: str = "x", count: int = 1) -> Algorithm:
    return replace(algorithm, estimate=partial(algorithm.estimate, seen=(cap, strict, level, name, count)))


def two(first: Algorithm, second: Algorithm | None = None) -> Algorithm:
    return replace(first, weigh=(first if second is None else second).weigh)


def budget(max_tokens=100, **others: Any):
    return replace(grpo(), estimate=partial(grpo().estimate, seen=(max_tokens, others)))


def out_of_range(beta: float = 0.1):
    raise ConfigError(f"beta is {beta}, expected at least 1")


def broken():
    return 1 / 0


def no_algorithm():
    return 3.0


def takes_function(loss: Algorithm.__init__ = None):
    return grpo()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def refusal(expression: str) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(expression)
    return str(refused.value)


def seen(expression: str) -> object:
    """Return the argument with which a function of `own` was called."""
    estimate = resolve(expression).estimate
    assert isinstance(estimate, partial)
    return estimate.keywords["seen"]


def test_the_presets_are_the_functions_of_the_library_that_return_an_algorithm_and_nothing_else():
    assert {"grpo", "ppo", "decoupled", "recomputed", "truncated"} <= set(PRESETS)
    assert not {"chain", "is_corrected", "replace", "policy_loss", "group_mean"} & set(PRESETS)
    assert PRESETS["gae"] is algorithms.ppo
    assert all(vars(algorithms)[name] is function for name, function in PRESETS.items() if name != "gae")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_each_preset_alone_or_around_grpo_is_an_algorithm(name: str):
    wraps = "algorithm" in PRESETS[name].__annotations__
    short, called = (f"{name}(grpo)", f"{name}(grpo())") if wraps else (name, f"{name}()")
    if name == "gdpo":  # which cannot know the names of a user's rewards
        short, called = "gdpo('right form=0.5')", "gdpo(components='right form=0.5')"
    assert isinstance(resolve(short), Algorithm)
    assert describe_call(parse_algorithm(short), 8) == describe_call(parse_algorithm(called), 8)


@pytest.mark.parametrize(
    ("expression", "algorithm"),
    [
        ("grpo", algorithms.grpo()),
        ("  grpo ( ) ", algorithms.grpo()),
        ("dapo(clip_high=0.3)", algorithms.dapo(clip_high=0.3)),
        ("dapo(0.1, 0.3)", algorithms.dapo(0.1, 0.3)),
        ("dapo(0.1, epsilon=1e-6,)", algorithms.dapo(0.1, epsilon=1e-6)),
        ("dapo(clip_high=1)", algorithms.dapo(clip_high=1.0)),
        ("grpo(\n  dual = None,\n  clip_high = +.3\n)", algorithms.grpo(clip_high=0.3)),
        ("dr_grpo", algorithms.dr_grpo(max_tokens=8)),
        ("dr_grpo(clip_low=0.1)", algorithms.dr_grpo(max_tokens=8, clip_low=0.1)),
        ("dr_grpo(max_tokens=64)", algorithms.dr_grpo(max_tokens=64)),
        ("decoupled(dapo(clip_high=0.28), cap=5.0)", algorithms.decoupled(algorithms.dapo(clip_high=0.28), cap=5.0)),
        ("truncated(rloo())", algorithms.truncated(algorithms.rloo())),
        (
            "decoupled(recomputed(dr_grpo), None, floor=0)",
            algorithms.decoupled(algorithms.recomputed(algorithms.dr_grpo(8)), None, floor=0.0),
        ),
        ("reinforce_plus_plus(kl=k3)", algorithms.reinforce_plus_plus(kl=k3)),
        ("grpo(kl_coef=0.1, kl=k2)", algorithms.grpo(kl_coef=0.1, kl=k2)),
        ("ppo(kl_coef=0.1, kl=abs_kl)", algorithms.ppo(kl_coef=0.1, kl=abs_kl)),
        ("gigpo(kl_coef=0.1, kl=k3_straight_through)", algorithms.gigpo(kl_coef=0.1, kl=straight_through(k3))),
        ("gdpo('right form=0.5')", algorithms.gdpo({"right": 1.0, "form": 0.5})),
        ("gigpo(omega=0.5, combine=interpolate)", algorithms.gigpo(omega=0.5, combine=interpolate)),
        ("gigpo(add_final_reward=True)", algorithms.gigpo(add_final_reward=True)),
        ("rollouts.algorithms.presets:rloo", algorithms.rloo()),
        ("rollouts.algorithms.presets:dapo(clip_high=0.3)", algorithms.dapo(clip_high=0.3)),
    ],
)
def test_an_expression_means_what_the_same_python_means(expression: str, algorithm: Algorithm):
    assert repr(resolve(expression)) == repr(algorithm)


def test_functions_of_the_users_compose_with_presets(own: Path):
    assert repr(resolve("own.py:plain")) == repr(algorithms.grpo())
    assert repr(resolve(f"{own}:plain")) == repr(algorithms.grpo())
    assert seen("own.py:around(own.py:plain)") == (5.0, True, "token", "x", 1)
    assert seen("own.py:around(grpo(kl_coef=0.1), -2.5, strict=False)") == (-2.5, False, "token", "x", 1)
    assert seen("own.py:around(dapo, cap=None, level='sequence', name='a:b(c', count=-3)") == (None, True, "sequence", "a:b(c", -3)
    assert repr(resolve("own.py:two(grpo, dr_grpo())").weigh) == repr(algorithms.dr_grpo(max_tokens=8).weigh)
    assert repr(resolve("own.py:two(grpo, None)").weigh) == repr(algorithms.grpo().weigh)
    inner = resolve("own.py:around(own.py:around(rollouts.algorithms.presets:rloo, 1), 2)").estimate
    assert repr(inner).startswith("functools.partial") and seen("own.py:around(own.py:around(rloo, 1), 2)") == (2.0, True, "token", "x", 1)


def test_a_path_may_hold_what_a_name_may_not(own: Path):
    directory = own.parent / "my algorithms-2 é"
    directory.mkdir()
    own.rename(directory / "own file.py")
    assert isinstance(resolve("my algorithms-2 é/own file.py:plain"), Algorithm)


def test_the_token_budget_goes_where_it_is_asked_for_and_not_given(own: Path):
    assert seen("own.py:budget") == (8, {})
    assert seen("own.py:budget(max_tokens=9, other='x')") == (9, {"other": "x"})
    assert repr(resolve("own.py:two(dr_grpo)").weigh) == repr(algorithms.dr_grpo(max_tokens=8).weigh)


def test_the_description_writes_every_argument_out(own: Path):
    assert describe_call(parse_algorithm("dapo(clip_high=0.3)"), 8) == "dapo(clip_low=0.2, clip_high=0.3, epsilon=0.0001, dual=None)"
    assert "kl=k1" in describe_call(parse_algorithm("reinforce_plus_plus"), 8)
    assert describe_call(parse_algorithm("dr_grpo"), 8).startswith("dr_grpo(max_tokens=8, ")
    text = describe_call(parse_algorithm("own.py:around(dr_grpo(clip_low=0.1))"), 8)
    assert text.startswith(
        "own.py:around(algorithm=dr_grpo(max_tokens=8, clip_low=0.1, clip_high=0.2), cap=5.0, strict=True, level='token'"
    )
    assert describe_call(parse_algorithm(text), 5) == text, "a description is an expression of the same algorithm"


def test_parsing_calls_nothing(own: Path):
    call = parse_algorithm("own.py:around(own.py:broken)")
    assert call.name == "own.py:around" and call.arguments["algorithm"].name == "own.py:broken"


KNOWN = "nown are .*grpo, .*reinforce, .*rloo.*, or module:function"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        # names
        ("gropo", f"unknown algorithm 'gropo': did you mean 'grpo'\\? K{KNOWN} .at column 1 of 'gropo'"),
        ("qqqq()", f"unknown algorithm 'qqqq': k{KNOWN}"),
        ("own.py:two(grpo, ddapo(1))", "unknown algorithm 'ddapo': did you mean 'dapo'.*at column 18 of"),
        ("own.py:nothing", "own.py has no function 'nothing'"),
        ("nowhere.py:plain", "there is no file nowhere.py"),
        ("nowhere.module:plain", "cannot import 'nowhere.module'"),
        ("", f"the algorithm is '', expected an expression such as grpo\\(kl_coef=0.1\\): k{KNOWN}"),
        # arguments
        ("dapo(clip_hi=0.3)", "dapo was given an unknown argument 'clip_hi' .did you mean 'clip_high'\\?., at column 6 of .* It takes "
         "clip_low=0.2, clip_high=0.28, epsilon=0.0001"),
        ("rloo(1)", "rloo was given one argument too many, '1', at column 6"),
        ("own.py:plain(a=1)", "unknown argument 'a'.* takes no arguments: write own.py:plain\\(\\)"),
        ("dapo(0.1, clip_low=0.2)", "the argument 'clip_low' twice, at column 11"),
        ("dapo(clip_low=0.1, clip_low=0.2)", "the argument 'clip_low' twice, at column 20"),
        ("own.py:around()", "own.py:around needs the argument 'algorithm' at column 1 .*: write own.py:around\\(grpo\\(\\)\\)"),
        ("own.py:two", "needs the argument 'first'"),
        # types
        ("dapo(clip_high='0.3')", "found '0.3' at column 16 .* as 'clip_high' of dapo, expected a number"),
        ("dapo(clip_high=True)", "found True .*, expected a number"),
        ("dapo(clip_high=None)", "found None .*, expected a number"),
        ("grpo(dual='x')", "expected a number or None"),
        ("dr_grpo(max_tokens=8.5)", "found 8.5 .*, expected a whole number"),
        ("own.py:around(grpo, strict=1)", "found 1 .*, expected True or False"),
        ("own.py:around(grpo, level='row')", "found 'row' .*, expected 'token' or 'sequence'"),
        ("own.py:around(grpo, level=token)", "found the name 'token' .*, expected 'token' or 'sequence'. Strings stand in quotes"),
        ("own.py:around(3)", "found 3 at column 15 .* as 'algorithm' of own.py:around, expected an algorithm, as grpo"),
        ("dapo(clip_high=grpo)", "found the name 'grpo' .*, expected a number"),
        ("dapo(clip_high=grpo())", "found a call 'grpo\\(\\)' .*, expected a number"),
        ("dapo(clip_high=1e999)", "found '1e999' .*, expected a finite number"),
        ("dapo(clip_high=-1e999)", "found '-1e999' .*, expected a finite number"),
        ("dapo(clip_high=" + "9" * 400 + ")", "found '999.*, expected a finite number"),
        ("decoupled(grpo, approximate=k2)", "found the name 'k2' .*, expected one of interpolate_log_probs, interpolate_probs or None"),
        ("gigpo(combine=k2)", "found the name 'k2' .*, expected one of add_weighted, interpolate"),
        ("reinforce_plus_plus(kl=k4)", "found the name 'k4' .*, expected one of k1, abs_kl, k2, k3"),
        ("reinforce_plus_plus(kl='k3')", "found 'k3' .*, expected one of k1, abs_kl, k2, k3"),
        ("own.py:takes_function(loss=3)", "found 3 .*, expected what cannot be written here"),
        # the functions themselves
        ("dapo(clip_low=1)", "^dapo\\(clip_low=1\\): clip_low is 1.0, expected in \\[0, 1\\)"),
        ("decoupled(dapo(clip_low=-2), cap=5)", "^dapo\\(clip_low=-2\\): clip_low is -2.0, .* .in 'decoupled.dapo.clip_low=-2., cap=5.'.$"),
        ("own.py:out_of_range(beta=0.5)", "^own.py:out_of_range\\(beta=0.5\\): beta is 0.5, expected at least 1$"),
        ("own.py:two(grpo, own.py:out_of_range)", "^own.py:out_of_range: beta is 0.1, .* .in 'own.py:two.grpo, own.py:out_of_range.'"),
        ("own.py:broken", r"own.py:broken raised ZeroDivisionError: division by zero \(.*own.py:\d+\)$"),
        ("own.py:two(own.py:broken)", r"own.py:broken raised ZeroDivisionError: division by zero \(.*own.py:\d+\) \(in 'own.py:two"),
        ("own.py:no_algorithm", "own.py:no_algorithm returned a float, expected an Algorithm"),
        ("time:time", "time:time is a builtin_function_or_method, expected a Python function that creates an algorithm"),
        ("own.py:Algorithm", "own.py:Algorithm is a class, expected a Python function"),
        ("own.py:partial", "own.py:partial is a class, expected a Python function"),
        ("own.py:replace", "own.py:replace has no return annotation Algorithm, so it is not called: .* -> Algorithm"),
        # syntax
        ("grpo(", "cannot read the algorithm 'grpo\\(': .* at column 5"),
        ("grpo)", "cannot read the algorithm .* at column 5"),
        ("grpo dapo", "cannot read the algorithm .* at column \\d"),
        ("grpo(clip_low=)", "cannot read the algorithm"),
        ("grpo(1)\x00", "cannot read the algorithm"),
        ("grpo; dapo", "cannot read the algorithm .* at column 5"),
        ("x = grpo()", "cannot read the algorithm"),
        ("grpo(x:=1)", "cannot import|cannot read|found"),
        # size
        ("grpo(" + " " * MAX_LENGTH + ")", f"has {MAX_LENGTH + 6:,} characters, expected at most {MAX_LENGTH:,}"),
        ("own.py:two(" * MAX_DEPTH + "grpo" + ")" * MAX_DEPTH, f"nests more than {MAX_DEPTH} deep at column"),
        ("(" * 300 + "grpo" + ")" * 300, "too many nested parentheses"),
        ("grpo(" + "-" * 1900 + "1)", "cannot read|found"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_mistake_is_refused_with_its_place_and_what_to_do(expression: str, message: str, own: Path):
    refused = refusal(expression)
    assert re.search(message, refused), refused
    assert len(refused) < 1000 and "\n" not in refused


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch evil')",
        "__import__('os')",
        "(lambda: grpo())()",
        "grpo.__class__",
        "grpo().estimate",
        "grpo()()",
        "grpo()[0]",
        "[grpo()][0]",
        "[grpo for _ in 'x']",
        "grpo if True else dapo",
        "grpo() or dapo()",
        "'grpo'",
        "5",
        "None",
        "(grpo, dapo)",
        "{'a': grpo}",
        "f'{grpo}'",
        "-grpo",
        "await grpo()",
        "(x := grpo)",
        "dapo(clip_high=__import__('os').system('touch evil'))",
        "dapo(clip_high=(lambda: 1)())",
        "dapo(clip_high=0.1 + 0.2)",
        "dapo(clip_high=--1)",
        "dapo(clip_high=not 1)",
        "dapo(clip_high=~1)",
        "dapo(clip_high=[0.1])",
        "dapo(clip_high={})",
        "dapo(clip_high=(0.1, 0.2))",
        "dapo(clip_high=x.y)",
        "dapo(clip_high=1j)",
        "dapo(clip_high=b'1')",
        "dapo(clip_high=...)",
        "dapo(clip_high=f'{1}')",
        "dapo(*[0.1])",
        "dapo(*grpo)",
        "dapo(**{'clip_high': 0.1})",
        "dapo(x for x in 'a')",
        "own.py:around(grpo, name=__file__)",
        "own.py:around(grpo, name='a'.upper())",
        "own.py:around(grpo, name='{}'.format(1))",
        "own.py:around(grpo().__init__)",
        "resolve_algorithm('grpo', 8)",
        "algorithms.grpo()",
        "PRESETS",
    ],
)
def test_nothing_but_presets_references_and_literals_is_read(expression: str, own: Path):
    refusal(expression)
    assert not (own.parent / "evil").exists()


@pytest.mark.parametrize(
    "expression",
    [
        "os:system('touch evil')",
        "builtins:eval('1 + 1')",
        "builtins:exec",
        "subprocess:run('touch evil', shell=True)",
        "subprocess:getoutput('touch evil')",
        "functools:partial",
        "operator:call",
        "operator:add(1, 2)",
        "operator:methodcaller('x')",
        "shutil:copy('own.py', 'evil')",
        "decoupled(os:system('touch evil'))",
        "rollouts.rewards.answers:load_module('evil.py')",
        "rollouts.types:Algorithm",
    ],
)
def test_nothing_but_a_function_that_makes_algorithms_is_called(expression: str, own: Path):
    assert re.search("is a (class|builtin_function_or_method)|has no return annotation Algorithm", refusal(expression))
    assert not (own.parent / "evil").exists()


ELSEWHERE = """
from __future__ import annotations
from typing import TYPE_CHECKING
import functools
import rollouts.algorithms.presets as presets
import rollouts.types
if TYPE_CHECKING:
    from rollouts.types import Algorithm

def named(x: float = 1.0) -> Algorithm:
    return presets.grpo()

def dotted(x: float = 1.0) -> rollouts.types.Algorithm:
    return presets.grpo()

def silent():
    return presets.grpo()

@functools.lru_cache
def cached() -> Algorithm:
    return presets.grpo()

def other() -> float:
    return 1.0
"""


def test_of_a_module_only_functions_that_say_they_return_an_algorithm_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere_module.py").write_text(ELSEWHERE)
    for name in ("named", "dotted", "named(x=2)"):
        assert repr(resolve(f"elsewhere_module:{name}")) == repr(algorithms.grpo())
    for name in ("silent", "other", "cached"):
        refusal(f"elsewhere_module:{name}")
    monkeypatch.chdir(tmp_path)
    assert isinstance(resolve("elsewhere_module.py:silent"), Algorithm)


def test_a_module_that_cannot_be_imported_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_on_import.py").write_text("x = 1\nx = {}['key']\n")
    for reference in ("raises_on_import:f", f"{tmp_path}/raises_on_import.py:f"):
        assert re.search(r"KeyError: 'key' \(.*raises_on_import.py:2\)", refusal(reference))


def test_a_configuration_cannot_call_what_makes_no_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text('{"rl": {"algorithm": "os:system(\'touch evil\')"}}')
    assert main(["--config", "c.json", "--dry-run"]) == 2
    assert "error: the algorithm is 'os:system': os:system is a builtin_function_or_method" in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()


@given(st.text(alphabet="grpodapo()=,.'\"*[]{}:-+0123456789 \n\\é_", max_size=60))
def test_any_text_is_an_algorithm_or_one_refusal(text: str):
    try:
        assert isinstance(resolve(text), Algorithm)
    except ConfigError as refused:
        assert str(refused)


@given(low=st.floats(0.01, 0.9), high=st.floats(0.01, 5.0), epsilon=st.floats(1e-9, 1.0))
def test_numbers_arrive_exactly(low: float, high: float, epsilon: float):
    expression = f"dapo(clip_low={low!r}, clip_high={high!r}, epsilon={epsilon!r}, dual=None)"
    assert repr(resolve(expression)) == repr(algorithms.dapo(low, high, epsilon))
    assert describe_call(parse_algorithm(expression), 8) == expression


def test_an_interpolation_is_named():
    expression = "decoupled(grpo, segment_wise=True, missed_as_proximal=True, approximate=interpolate_probs)"
    expected = algorithms.decoupled(algorithms.grpo(), segment_wise=True, missed_as_proximal=True, approximate=interpolate_probs)
    assert repr(resolve_algorithm(expression, 8)) == repr(expected)
    assert "approximate=interpolate_probs" in describe_call(parse_algorithm(expression), 8)
