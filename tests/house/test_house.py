"""The rules of docs/architecture.md, held by reading the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import needs
import pytest
from house.packages import ROOT, WORDS, find_room, list_imports, parse, walk

PURE = (*WORDS, "algorithms")
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


def all_imports(path: Path) -> set[str]:
    """First parts of everything that a file imports at any place."""
    return {module.split(".")[0] for _, module in list_imports(path)}


@of_each([p for p in FILES if p.name != "__init__.py" and find_room(p) in PURE and find_room(p) not in {"user_code", "output_files"}])
def test_pure_layers_have_no_clock_network_concurrency_or_global_randomness(path: Path):
    assert not all_imports(path) & {"time", "datetime", "random", "threading", "subprocess", "socket", "httpx", "trio"}


NAMES_OF_CHOICES = {  # what a configuration or a command line names; everywhere else a choice is a function or a flag
    "config": {"OnBadUpdate", "OnBadMeasure", "OnBadRow", "Schedule", "Moments", "OnRewardError", "WeightSync", "ParityAction"},
    "async_config": {"WhenQueueFull", "RolloutOrder", "OnStale", "OnFailure", "InFlight", "CheckpointInFlight", "MissedSegment"},
    "tokenize": {"OnOverflow"},
    "episode_config": {"OnRewrite", "OnEpisodeError"},
    "collate": {"PaddingSide"},
}


@of_each([p for p in FILES if find_room(p) in {*PURE, "chat", "data"} - {"types", "steps"}])
def test_pure_functions_are_not_told_what_to_do_by_strings(path: Path):
    tree, own = parse(path), NAMES_OF_CHOICES.get(path.stem, set())
    named = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = {
        id(sub): getattr(t, "id", "") for n in named for t in getattr(n, "targets", [getattr(n, "target", None)]) for sub in ast.walk(n)
    }
    for node in walk(path):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            assert targets.get(id(node)) in own, f"{path}:{node.lineno} chooses by a string: pass a function, or a flag"


def is_mutable(value: ast.expr | None) -> bool:
    """Return whether an expression makes a list, dict, set or the like."""
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "ChainMap"}
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp)


RUNS_SOURCE_CODE = ROOT / "rollouts" / "sandbox" / "inside" / "worker.py"  # inside of a sandbox, and nowhere else


INHERITED = ROOT / "rollouts" / "trainer" / "engines.py"  # a server that the facade launches gets the variables of its program


@of_each(FILES)
def test_no_hidden_globals_prints_or_environment(path: Path):
    tree = parse(path)
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = {t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)}
        assert targets == {"__all__"} or not is_mutable(value), f"{path}:{node.lineno} is a mutable object at module level"
    for node in walk(path):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno} uses global"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            allowed = {"exec"} if path == RUNS_SOURCE_CODE else set()
            assert node.func.id not in {"print", "eval", "exec"} - allowed, f"{path}:{node.lineno} calls {node.func.id}"
            shell = {getattr(k.value, "value", None) for k in node.keywords if k.arg == "shell"}
            assert shell <= {False}, f"{path}:{node.lineno} starts a shell"
        name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
        names = {"getenv", "putenv"} | (set() if path == INHERITED else {"environ"})
        assert name not in names, f"{path}:{getattr(node, 'lineno', 0)} reads the environment"


@of_each([p for p in ALL_FILES if p != ROOT / "rollouts" / "checks.py" and p.parts[-2] != "inside" and "testing" not in p.parts])
def test_json_of_users_and_the_world_is_read_by_parse_json(path: Path):
    for node in walk(path):
        if not isinstance(node, ast.Attribute) or getattr(node.value, "id", "") != "json" or node.attr not in {"load", "loads"}:
            continue
        line = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
        assert "json.loads(json.dumps(" in line, f"{path}:{node.lineno} reads JSON without parse_json, which names too deep nesting"


UNPICKLES = ROOT / "rollouts" / "backends" / "ranks" / "channel.py"  # what the other processes of the same run send, and nothing else


def is_unpickler(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "Unpickler"


@of_each(ALL_FILES)
def test_nothing_unsafe_is_loaded(path: Path):
    for node in walk(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not names & {"marshal", "shelve", "asyncio"}, f"{path}:{node.lineno} imports {names}"
            assert not (isinstance(node, ast.ImportFrom) and node.module == "pickle"), f"{path}:{node.lineno} hides where it unpickles"
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pickle":
            assert node.attr not in {"load", "loads"} or path == UNPICKLES, f"{path}:{node.lineno} unpickles"
            restricted = [c for c in walk(path) if isinstance(c, ast.ClassDef) and any(is_unpickler(b) for b in c.bases)]
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
    for node in walk(path):
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
            is_overload = "overload" in {getattr(decorator, "id", "") for decorator in node.decorator_list}
            assert is_overload or ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"


@of_each(ALL_FILES)
def test_nothing_is_left_for_later(path: Path):
    text = path.read_text()
    for word in ("TODO", "FIXME", "XXX", "NotImplementedError"):
        assert word not in text, f"{path} contains {word}"


PLACES = ("/work/", "../shared", "shared/", "/tmp/", "/root/", "/home/")
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted(p for folder in ("tools", "benchmarks", "examples") for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".sh"})
SOURCES = [path for path in (*ALL_FILES, *TESTS, *SCRIPTS) if path != Path(__file__)]
PATHS_OF_CODE = re.compile(r"(ROOT|Path\((?:[\w.]+\.)?__file__\))((?:\.resolve\(\)|\.absolute\(\)|\.parents\[\d+\]|\.parent\b)+)")


@of_each([*SOURCES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"])
def test_nothing_names_a_place_on_one_machine(path: Path):
    text = re.sub(r"/proc/[^/\s]+/root/", "", path.read_text())  # what a process sees as its root
    for place in PLACES:
        assert place not in text, f"it mentions {place}"


@of_each([path for path in SOURCES if path.suffix == ".py"])
def test_nothing_is_looked_for_beside_the_project(path: Path):
    """A path that begins at __file__ or ROOT stays in the project; what lies elsewhere is named by an option or a variable."""
    depth = len(path.relative_to(ROOT).parts)
    for found in PATHS_OF_CODE.finditer(path.read_text()):
        ups = len(re.findall(r"\.parent\b", found[2])) + sum(int(number) + 1 for number in re.findall(r"\[(\d+)\]", found[2]))
        assert ups <= (0 if found[1] == "ROOT" else depth), f"{found[0]} is not in the project"


@of_each([path for path in TESTS if path.name != "needs.py"])
def test_a_test_is_skipped_only_for_a_need_that_says_what_to_do(path: Path):
    found = re.search(r"\b(?:pytest|mark|unittest)\.(?:skip|skipif|importorskip)\b.*", path.read_text())
    assert not found, f"{found[0]!r}: say what the test needs in tests/support/needs.py"


@of_each(TESTS)
def test_a_file_that_gives_a_mark_without_its_name_is_found_by_its_text(path: Path):
    """Where a mark is asked for, conftest.py does not import files without it."""
    text = path.read_text()
    if re.search(r"getattr\(pytest\.mark\b", text):
        assert "in CLIENTS]" in text, "add a text of this file to GIVEN_BY in tests/conftest.py"


def test_each_need_says_what_to_do():
    found = [need() if callable(getattr(need, "cache_info", None)) else need for need in vars(needs).values()]
    reasons = [need.mark.kwargs["reason"] for need in found if isinstance(need, pytest.MarkDecorator)]
    assert len(reasons) > 10
    for reason in reasons:
        assert re.fullmatch(r"needs .+: (set|install|pip install|run|allow) .+", reason), reason


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.ipynb")),
]


@of_each([*SOURCES, *PAGES, ROOT / "pyproject.toml", ROOT / ".ci" / "run"])
def test_pip_is_told_the_name_of_this_project_and_not_that_of_another_one(path: Path):
    """On PyPI `rollouts` belongs to somebody else; only what is imported has that name here."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    own, extras = re.escape(name.removeprefix("rollouts")), r"\[(?:plots|data|wandb|lora|math|jax|docs|test|dev)"
    assert own, "the name is taken"
    other = rf"pip install [^#\n]*?['\" ]rollouts(?!{own})\b|\brollouts\\?{extras}|version\(['\"]rollouts['\"]\)"
    found = re.search(rf"(?:{other}).*", path.read_text())
    assert not found, f"{found[0]!r} names another package: say {name}"


def list_loaded(nodes: Iterable[ast.stmt]) -> Iterable[str]:
    """Modules that are loaded with a file: imports in whatever block outside of functions, except for type checkers."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            yield from list_loaded(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from list_loaded(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


@of_each([path for path in FILES if path.parent.name != "jax"])  # of these JAX is the subject
def test_no_module_imports_what_is_heavy_or_optional_when_it_is_imported(path: Path):
    for module in list_loaded(parse(path).body):
        heavy = {module.split(".")[0]} & {"transformers", "jax", "optax", "torchax", "peft", "accelerate"}
        assert not heavy and not f"{module}.".startswith("rollouts.backends.jax."), f"import {module} in the function that needs it"


POSIX_ONLY = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog"}
INSIDE_OF_SANDBOXES = {
    ROOT / "rollouts" / "sandbox" / "inside" / f"{name}.py" for name in ("init", "processes", "source_code", "worker")
} | {ROOT / "rollouts" / "rewards" / "code" / f"{name}.py" for name in ("judge", "program", "worker")}


@of_each([path for path in ALL_FILES if path not in INSIDE_OF_SANDBOXES])
def test_no_module_needs_posix_to_be_imported(path: Path):
    found = POSIX_ONLY & {module.split(".")[0] for module in list_loaded(parse(path).body)}
    assert not found, f"{found} are not on Windows: import them in the function that needs them"


WITHOUT_POSIX = f"""
import importlib, os, signal, socket, sys
import httpx, rich, safetensors.torch, trio, tyro  # these and the next ask which platform it is
import torch.distributed.checkpoint, transformers.models.qwen3.modeling_qwen3
for name in {sorted(POSIX_ONLY)}:
    sys.modules[name] = None
posix = "fork forkpty killpg getuid geteuid getgid setsid getpgid sysconf statvfs pread pwrite sched_getaffinity mkfifo memfd_create "
posix += "getloadavg register_at_fork WNOHANG O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK"
signals = "SIGKILL SIGHUP SIGCHLD SIGUSR1 SIGUSR2 SIGXCPU SIGPIPE SIGALRM SIGSTOP SIGCONT pthread_sigmask SIG_SETMASK SIG_BLOCK setitimer"
for module, names in ((os, posix), (signal, signals), (socket, "AF_UNIX")):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in sys.argv[2].split(","):
    importlib.import_module(name)
from integration.train import main
sys.exit(main(["--mode", "sft+rl", "--dry-run", "--rl.asynchronous.enabled", "--output-dir", sys.argv[1]]))
"""


@pytest.mark.slow
def test_without_what_windows_lacks_every_module_is_imported_and_a_run_is_planned(tmp_path: Path):
    """The default job was seen to run like this, too, but for the lock of its directory, which is another one there."""
    modules = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in ALL_FILES if p not in INSIDE_OF_SANDBOXES and p.name != "__init__.py"
    ]
    command = [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path / "run"), ",".join(modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "mode sft+rl" in done.stdout


def test_ci_runs_the_two_commands_of_the_readme():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    script = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2
    for command in commands:
        assert command in script.replace(" \\\n", " \n"), f".ci/run does not run {command!r}"


def test_ci_runs_every_file_of_tests_that_needs_another_device_or_environment():
    """Its steps name files and folders: a whole suite would be collected for each."""
    script = (ROOT / ".ci" / "run").read_text()
    for need in ("mark.gpu", "@needs.TINKER", "needs.OPENAI_AGENTS"):
        files = [path.relative_to(ROOT) for path in TESTS if path != Path(__file__) and need in path.read_text(encoding="utf-8")]
        assert files, f"no test has {need}"
        missing = [str(path) for path in files if not any(re.search(rf" {place}\s", script) for place in (path, *path.parents[:-2]))]
        assert not missing, f".ci/run does not run {missing}, which have {need}"
