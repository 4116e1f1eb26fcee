"""Models named by their names on the hub, against a stand-in of the hub on loopback and a cache of its own."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import needs
import pytest
from hub_server import Hub, serve_hub

from integration import command as command_module
from integration.convert import push
from integration.doctor import examine
from integration.parts.hub_models import find_models, names_hub, names_hub_model
from integration.settings.command_line import parse_command_line
from integration.settings.config import Config
from integration.settings.sections.model import ModelSection, ReferenceSection
from integration.settings.sections.preference import PreferenceSection
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import ConfigError, RolloutsError
from rollouts.models.hub import find_hub_model, is_hub_name
from rollouts.models.loading import load_hf_model, load_tokenizer
from rollouts.testing import create_tiny_model

NAME = "tiny/letters"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    create_tiny_model().save_pretrained(path)
    create_char_tokenizer(64).save_pretrained(path)
    return path


@pytest.fixture
def hub(model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    """A hub with one model, and an empty cache, as HF_ENDPOINT and HF_HOME would choose them at the start of a process."""
    from huggingface_hub import constants

    with serve_hub() as hub:
        hub.add(NAME, model_directory)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def run_command(hub: Hub, home: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])} | variables
    command = [sys.executable, "-m", "integration.train", *argv]
    return subprocess.run(command, cwd=home.parent, env=own, capture_output=True, text=True, timeout=110)


def test_a_name_has_the_form_of_the_hub_and_is_no_path_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "own").mkdir(parents=True)
    assert is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("tiny/letters")
    assert not any(map(is_hub_name, ["runs/own", "runs/mistyped", "own", "./own/model", "/a/b", "~/a", "a/b/c", "..", "a/"]))


def test_a_model_is_downloaded_once_and_loads_as_the_directory_it_was_made_from(hub: Hub, tmp_path: Path, model_directory: Path):
    found = find_hub_model(NAME)
    assert found.commit == hub.branches[NAME]["main"]
    assert found.directory == tmp_path / "cache" / "models--tiny--letters" / "snapshots" / found.commit
    loaded, own = load_hf_model(found.directory), load_hf_model(model_directory)
    assert all((a == b).all() for a, b in zip(loaded.parameters(), own.parameters(), strict=True))
    assert load_tokenizer(found.directory).get_vocab() == load_tokenizer(model_directory).get_vocab()
    before = len(hub.requests)
    assert find_hub_model(NAME, found.commit) == found
    assert len(hub.requests) == before  # a commit that is in the cache asks nothing


def test_a_dry_run_takes_no_weights_and_a_run_those_in_safetensors_alone(hub: Hub):
    hub.commit(NAME, {"pytorch_model.bin": b"old", "flax_model.msgpack": b"other"})
    found = find_hub_model(NAME, weights=False)
    assert not list(found.directory.glob("*.safetensors")) and (found.directory / "config.json").exists()
    assert {path.suffix for path in find_hub_model(NAME).directory.iterdir()}.isdisjoint({".bin", ".msgpack"})


def test_weights_of_the_older_format_are_taken_where_there_are_no_others(hub: Hub):
    hub.commit("tiny/old", {"config.json": b"{}", "pytorch_model.bin": b"old"})
    assert (find_hub_model("tiny/old").directory / "pytorch_model.bin").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["path", "eval_path"])
def test_pairs_of_the_hub_need_the_hub(name: str):
    section = PreferenceSection(**{"path": "pairs.jsonl", name: "hf://some/pairs"})
    assert names_hub(Config(preference=section)) and not names_hub(Config(preference=PreferenceSection(path="pairs.jsonl")))


def test_a_revision_is_resolved_and_recorded_for_each_model(hub: Hub, model_directory: Path):
    main = hub.branches[NAME]["main"]
    other = hub.add(NAME, model_directory, branch="second")
    config = Config(model=ModelSection(path=NAME, revision="second"), reference=ReferenceSection(path=f"{NAME}@main"))
    assert names_hub_model(config) and not names_hub_model(Config())
    recorded, local = find_models(config, quiet=True)
    assert (recorded.model.path, recorded.model.revision, recorded.reference.path) == (NAME, other, f"{NAME}@{main}")
    assert Path(local.model.path or "").name == other and Path(local.reference.path or "").name == main
    assert find_models(recorded, quiet=True) == (recorded, local)


@pytest.mark.parametrize(
    ("path", "revision", "message"),
    [
        ("tiny/lettres", None, "no such directory here, and no such model on http"),
        (NAME, "v9", "revision 'v9', which the model on the hub does not have"),
        ("tiny/gated", None, "whose owners ask for consent to their terms: accept them at http"),
    ],
)
def test_what_the_hub_refuses_is_said(path: str, revision: str | None, message: str, hub: Hub, model_directory: Path):
    hub.add("tiny/gated", model_directory)
    hub.gated.add("tiny/gated")
    with pytest.raises(ConfigError, match=r"model\.path is '") as error:
        find_hub_model(path, revision)
    assert message in str(error.value)


def test_offline_the_cache_is_used_and_what_it_lacks_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    found = find_hub_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert find_hub_model(NAME) == found
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids a download; .* did you mean 'tiny/letters'\?.*hf download tiny/leters"):
        find_hub_model("tiny/leters")
    assert len(hub.requests) == before


def test_a_hub_that_cannot_be_reached_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        find_hub_model(NAME)


def test_a_revision_of_a_directory_is_refused(model_directory: Path):
    with pytest.raises(ConfigError, match=r"model.revision is 'main', but model.path is the directory .*: leave --model.revision out"):
        find_models(Config(model=ModelSection(path=str(model_directory), revision="main")))
    with pytest.raises(ConfigError, match=r"there is no --model\.path ORG/NAME"):
        ModelSection(revision="main")


@pytest.mark.slow
def test_a_run_records_the_commit_and_resumes_with_it_offline(hub: Hub, tmp_path: Path, model_directory: Path):
    """The command with the variables of a process: trained from the hub, moved on there, resumed from the cache without a network."""
    commit, home = hub.branches[NAME]["main"], tmp_path / "home"
    settings = ["--mode", "sft", "--sft.num-steps", "2", "--sft.batch-size", "2", "--evaluation.num-prompts", "2", "--output-dir", "run"]
    first = run_command(hub, home, "--model.path", NAME, *settings)
    assert first.returncode == 0, first.stderr
    assert f"model.path: {NAME} at commit {commit}" in first.stderr
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["model"]["path"], saved["model"]["revision"]) == (NAME, commit)
    hub.add(NAME, model_directory)
    assert hub.branches[NAME]["main"] != commit
    before = len(hub.requests)
    more = run_command(hub, home, "--output-dir", "run", "--resume", "--sft.num-steps", "3", HF_HUB_OFFLINE="1")
    assert more.returncode == 0, more.stderr
    assert commit in more.stderr and len(hub.requests) == before


async def test_the_doctor_examines_a_model_that_is_named_by_its_name_on_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded: list[str | None] = []

    def load(config: Config) -> None:
        loaded.append(config.model.path)
        raise ConfigError("it is not loaded here")

    monkeypatch.setattr(examine, "create_model", load)
    command = parse_command_line(["--mode", "sft", "--model.path", NAME])
    (finding,) = await examine.examine(command, num_rows=2, directory=tmp_path, say=lambda text: None)
    assert finding.found == "it is not loaded here" and loaded == [str(find_hub_model(NAME).directory)]


def test_a_run_on_a_directory_asks_no_network(hub: Hub, tmp_path: Path, model_directory: Path):
    done = run_command(hub, tmp_path / "home", "--dry-run", "--model.path", str(model_directory))
    assert done.returncode == 0, done.stderr
    assert hub.requests == []


@pytest.mark.more
@needs.DATASETS
def test_rows_of_the_hub_for_a_model_on_the_disk_are_asked_for(hub: Hub, tmp_path: Path, model_directory: Path):
    settings = ("--mode", "sft", "--task", "jsonl", "--model.path", str(model_directory), "--data.path", "hf://own/rows")
    done = run_command(hub, tmp_path / "home", *settings)
    assert done.returncode == 2 and "hf://own/rows cannot be loaded" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert any(request.startswith("HEAD /datasets/own/rows/") for request in hub.requests), hub.requests
    offline = run_command(hub, tmp_path / "home", *settings, HF_HUB_OFFLINE="1")
    assert offline.returncode == 2 and "HF_HUB_OFFLINE is set" in offline.stderr, offline.stderr


HUB = "hf://own/rows"
JSONL = ("train", "--mode", "rl", "--task", "jsonl", "--model.path", "here")


@pytest.mark.parametrize(
    ("argv", "online"),
    [
        ((*JSONL, "--data.path", HUB), True),
        ((*JSONL, "--data.path", "a.jsonl", "--data.eval-path", HUB), True),
        ((*JSONL, "--data.mixture", "a.jsonl", f"{HUB}(split='test')"), True),
        ((*JSONL, "--data.rollouts", HUB), True),
        ((*JSONL, "--data.path", "a.jsonl"), False),
        (("train",), False),
        (("train-reward-model", "--data.path", HUB), True),
        (("train-reward-model", "--data.path", "a.jsonl", "--data.eval-path", HUB), True),
        (("train-reward-model",), False),
        (("eval", "here", "--tasks", "sort", HUB), True),
        (("eval", "here", "--tasks", f"gsm8k={HUB}"), True),
        (("eval", "here", "--task", "jsonl", "--data.path", HUB), True),
        (("eval", "here", "--task", "jsonl", "--data.path", HUB, "--tasks", "sort"), False),
        (("eval", "here"), False),
        (("reward", "mine.py:f", "--data", HUB), True),
        (("reward", "mine.py:f", "--data", "a.jsonl"), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_asks_the_network_for_data_exactly_if_it_names_some_of_the_hub(
    argv: tuple[str, ...], online: bool, monkeypatch: pytest.MonkeyPatch
):
    program = command_module.PROGRAMS[argv[0]]
    module = importlib.import_module(str(program.module))
    seen: list[str | None] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that what the command sets is undone
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(module, "_run" if argv[0] == "train" else "run", lambda *_: seen.append(os.environ.get("HF_HUB_OFFLINE")) or 0)
    assert command_module.main(list(argv)) == 0
    assert seen == [None if online else "1"]


@pytest.mark.parametrize("what", ["download", "push"])
def test_a_hub_that_never_answers_is_given_up_with_the_variable(
    what: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants, get_session

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts connections, and nobody reads them
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(push, "_PUSH_S", 0.5)
        hooks = get_session().event_hooks
        if what == "push":
            with pytest.raises(RolloutsError, match=r"tiny/letters could not be written on the hub \(.*timed out"):
                push.push_model(model_directory, NAME)
        else:
            with pytest.raises(ConfigError, match=r"does not answer within 1 s \(HF_HUB_DOWNLOAD_TIMEOUT\)"):
                find_hub_model(NAME)
        assert get_session().event_hooks == hooks, "the package is as it was"


@pytest.mark.usefixtures("hub")
def test_a_revision_in_the_name_goes_on_with_its_recorded_commit():
    config = Config(model=ModelSection(path=f"{NAME}@main"))
    recorded, local = find_models(config, quiet=True)
    again = replace(config, model=replace(config.model, revision=recorded.model.revision))  # as a rank, or a resumed run, is told
    assert find_models(again, quiet=True) == (recorded, local)
    with pytest.raises(ConfigError, match="leave one of them out"):
        find_models(replace(config, model=replace(config.model, revision="other")), quiet=True)
