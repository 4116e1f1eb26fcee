"""The rules of docs/architecture.md, held by reading the code."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import rollouts

ROOT = Path(__file__).parent.parent
LAYERS = (
    ("errors", "checks", "types", "steps"),
    (
        "weight_plan",
        "chat", "samples", "filters", "episode_columns", "batching", "logprobs", "statistics", "advantages", "gigpo", "gigpo_steps",
        "loss_weights", "kl", "surrogates", "losses", "preferences", "corrections", "covariance", "proximal", "kl_control", "staleness",
        "estimators", "algorithm_parts", "algorithms", "config_json", "config", "async_config", "chat_templates", "episode_config",
        "episode_summaries", "chat_formats", "transcripts", "trajectory_records",
    ),
    (
        "char_tokenizer", "data_buffer", "datasets", "preference_data", "packing", "model_weights", "checkpoints", "metrics",
        "trajectories", "rewards", "sandbox", "environments", "engines", "backends",
    ),
    (
        "generate_fns", "group_race", "generation", "rollout_manager", "rollout_queue", "staleness_control", "prompt_schedule",
        "rollout_runs", "finished_rollouts", "refused_groups", "rollout_book", "rollout_producer", "resident_samples", "executor_parts",
        "async_rollouts", "weight_sync", "weight_streams", "served_weights", "training_steps",
        "requirements", "rollout_training", "proximal_recompute", "workflows",
        "agent_policies", "episode_openings", "episode_course", "episodes", "episode_groups", "multi_turn", "rollout_worker",
        "agent_integration", "engine_parity", "sft_loop", "reward_model_loop", "rl_run", "rl_loop", "testing",
    ),
)  # fmt: skip
PROTOCOLS = {
    "rollouts.backends.protocol",
    "rollouts.backends.futures",
    "rollouts.backends.token_spec",
    "rollouts.engines.protocol",
    "rollouts.environments.protocol",
    "rollouts.environments.calls",
    "rollouts.environments.observations",
}
ORCHESTRATION_MAY_USE = {"data_buffer", "metrics", "checkpoints", "trajectories", "rewards"}
FILES = sorted((ROOT / "rollouts").rglob("*.py"))
ALL_FILES = [*FILES, *sorted((ROOT / "integration").rglob("*.py"))]


def of_each(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test over many files, which tells all that are wrong together: a test for each of them takes pytest longer than the check."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong: list[str] = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    wrong.append(f"{path.relative_to(ROOT)}: {error}")
            assert not wrong, "\n".join(wrong)

        test.__doc__ = check.__doc__
        return test

    return decorate


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "rollouts").parts[0].removesuffix(".py")


def layer_of(name: str) -> int:
    found = [i for i, names in enumerate(LAYERS) if name in names]
    assert found, f"rollouts/{name} is in no layer: add it to LAYERS here and to docs/architecture.md"
    return found[0]


def test_the_table_of_the_architecture_has_every_module_in_its_layer():
    text = (ROOT / "docs" / "architecture.md").read_text()
    there = {name_of(path) + ("/" if (ROOT / "rollouts" / name_of(path)).is_dir() else "") for path in FILES} - {"__init__"}
    listed: set[str] = set()
    for number, names in enumerate(LAYERS):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {number} ")]
        cell = re.findall(r"`([\w/]+)`", row.split("|")[2])
        assert {name.rstrip("/") for name in cell} == set(names), f"row {number} of the table and LAYERS differ"
        listed |= set(cell)
    assert listed == there


def imports_of(path: Path) -> set[str]:
    """Modules of this library that a file imports, whole names."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rollouts"):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("rollouts"))
    return found


@of_each([p for p in FILES if p.name != "__init__.py"])
def test_imports_follow_the_layers(path: Path):
    own = name_of(path)
    layer = layer_of(own)
    for module in imports_of(path):
        other = module.split(".")[1]
        assert layer_of(other) <= layer, f"{path} (layer {layer}) imports {module} of a higher layer"
        if layer == layer_of(other) <= 1 and own != other:
            assert LAYERS[layer].index(other) < LAYERS[layer].index(own), f"{path} imports {module}, a later file of its layer"
        assert not (own == "engines" and other == "backends"), f"{path} imports {module}"
        assert not (own == "backends" and other == "engines"), f"{path} imports {module}"
        if layer == 3 and layer_of(other) == 2:
            assert module in PROTOCOLS or other in ORCHESTRATION_MAY_USE, f"{path} imports {module}: orchestration sees protocols only"


def all_imports(path: Path) -> set[str]:
    """First parts of everything that a file imports at any place."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
    return found


@of_each(FILES)
def test_the_library_does_not_know_its_applications(path: Path):
    assert not all_imports(path) & {"integration", "tests", "benchmarks", "examples"}


@of_each([p for p in FILES if p.name != "__init__.py" and layer_of(name_of(p)) <= 1])
def test_pure_layers_have_no_clock_network_concurrency_or_global_randomness(path: Path):
    assert not all_imports(path) & {"time", "datetime", "random", "threading", "subprocess", "socket", "httpx", "trio"}


NAMES_OF_CHOICES = {  # what a configuration or a command line names; everywhere else a choice is a function or a flag
    "config": {"Schedule", "OnRewardError", "WeightSync", "ParityAction"},
    "async_config": {"WhenQueueFull", "RolloutOrder", "OnStale", "OnFailure", "InFlight", "CheckpointInFlight", "MissedSegment"},
    "chat": {"OnOverflow"},
    "episode_config": {"OnRewrite", "OnEpisodeError"},
    "batching": {"PaddingSide"},
}


@of_each([p for p in FILES if p.stem in LAYERS[1] and p.parent.name == "rollouts"])
def test_pure_functions_are_not_told_what_to_do_by_strings(path: Path):
    tree, own = parse(path), NAMES_OF_CHOICES.get(path.stem, set())
    named = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = {
        id(sub): getattr(t, "id", "") for n in named for t in getattr(n, "targets", [getattr(n, "target", None)]) for sub in ast.walk(n)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            assert targets.get(id(node)) in own, f"{path}:{node.lineno} chooses by a string: pass a function, or a flag"


def is_mutable(value: ast.expr | None) -> bool:
    """Whether an expression makes a list, dict, set or the like."""
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "ChainMap"}
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp)


RUNS_SOURCE_CODE = ROOT / "rollouts" / "sandbox" / "worker.py"  # inside of a sandbox, and nowhere else


@of_each(FILES)
def test_no_hidden_globals_prints_or_environment(path: Path):
    tree = parse(path)
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = {t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)}
        assert targets == {"__all__"} or not is_mutable(value), f"{path}:{node.lineno} is a mutable object at module level"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno} uses global"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            allowed = {"exec"} if path == RUNS_SOURCE_CODE else set()
            assert node.func.id not in {"print", "eval", "exec"} - allowed, f"{path}:{node.lineno} calls {node.func.id}"
            shell = {getattr(k.value, "value", None) for k in node.keywords if k.arg == "shell"}
            assert shell <= {False}, f"{path}:{node.lineno} starts a shell"
        name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
        assert name not in {"environ", "getenv", "putenv"}, f"{path}:{getattr(node, 'lineno', 0)} reads the environment"


UNPICKLES = ROOT / "rollouts" / "backends" / "rank_channel.py"  # what the other processes of the same run send, and nothing else


def is_unpickler(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "Unpickler"


@of_each(ALL_FILES)
def test_nothing_unsafe_is_loaded(path: Path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not names & {"marshal", "shelve", "asyncio"}, f"{path}:{node.lineno} imports {names}"
            assert not (isinstance(node, ast.ImportFrom) and node.module == "pickle"), f"{path}:{node.lineno} hides where it unpickles"
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pickle":
            assert node.attr not in {"load", "loads"} or path == UNPICKLES, f"{path}:{node.lineno} unpickles"
            restricted = [c for c in ast.walk(parse(path)) if isinstance(c, ast.ClassDef) and any(is_unpickler(b) for b in c.bases)]
            named = {getattr(f, "name", None) for c in restricted for f in c.body}
            assert not is_unpickler(node) or "find_class" in named, f"{path}:{node.lineno} unpickles whatever comes"
        if isinstance(node, ast.Call):
            assert not is_unpickler(node.func), f"{path}:{node.lineno} unpickles whatever comes"
            keywords = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            assert keywords.get("trust_remote_code") is not True, f"{path}:{node.lineno} trusts remote code"
            if isinstance(node.func, ast.Attribute) and node.func.attr == "load" and getattr(node.func.value, "id", "") == "torch":
                assert keywords.get("weights_only") is True, f"{path}:{node.lineno} unpickles"


@of_each(ALL_FILES)
def test_a_broad_except_reports_or_raises_again(path: Path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or getattr(node.type, "id", "") in {"Exception", "BaseException"}):
            ends = [n for n in ast.walk(node) if isinstance(n, ast.Raise)]
            kept = [n for n in ast.walk(node) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") in {"set_error", "add_note"}]
            assert ends or kept, f"{path}:{node.lineno} swallows every exception"


@of_each([p for p in ALL_FILES if p.name != "__init__.py"])
def test_public_things_have_docstrings(path: Path):
    tree = parse(path)
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"


@of_each(ALL_FILES)
def test_nothing_is_left_for_later(path: Path):
    text = path.read_text()
    for word in ("TODO", "FIXME", "XXX", "NotImplementedError"):
        assert word not in text, f"{path} contains {word}"


PLACES = ("/work/", "../shared", "shared/", "/tmp/", "/root/", "/home/")


@of_each([*ALL_FILES, ROOT / "README.md"])
def test_nothing_names_a_place_on_one_machine(path: Path):
    text = path.read_text()
    for place in PLACES:
        assert place not in text, f"{path} mentions {place}"


def test_importing_the_library_is_light():
    code = "import sys, rollouts; print('transformers' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_no_module_imports_what_is_heavy_or_optional_when_it_is_imported():
    files = [p for p in FILES if p.name != "__init__.py" and not p.name.startswith("jax_")]  # of these JAX is the subject
    modules = [str(p.relative_to(ROOT)).removesuffix(".py").replace("/", ".") for p in files]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module(m)\nprint(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"transformers", "jax", "optax", "torchax", "peft", "accelerate"} & set(out.split())


def test_every_public_name_is_there():
    import rollouts

    for name in rollouts.__all__:
        assert getattr(rollouts, name) is not None
    assert len(set(rollouts.__all__)) == len(rollouts.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        rollouts.no_such_name  # noqa: B018


def test_ci_runs_the_two_commands_of_the_readme():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    script = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2
    for command in commands:
        assert command in script.replace(" \\\n", " \n"), f".ci/run does not run {command!r}"


def test_no_public_name_is_hidden_by_a_module_of_the_same_name():
    """`from rollouts import x` gives the module x as soon as anything has imported it."""
    names = set(rollouts.__all__)
    assert not names & {name_of(path) for path in FILES}, "rename the module, or let the name be imported from its own module"
