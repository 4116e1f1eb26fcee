"""The how-to pages: their files are what a user would write, and their commands print what the pages say."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
import trio
from page_blocks import ROOT, find_missing, list_commands, normalize, run_command, write_files

from rollouts.testing import FakeVLLMServer

DOCS = ROOT / "docs"
START = DOCS / "your-model-and-data.md"
PAGES = sorted(DOCS.glob("how-to-*.md"))
NAMES = {"sft", "rl", "rewards", "agents", "lora", "servers", "several-gpus", "asynchronous"}


@pytest.fixture(scope="session")  # once for each worker, whose tests of this file need not follow one another
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model and the rows of the page about one's own, and the model that the page about SFT makes."""
    folder = tmp_path_factory.mktemp("start")
    write_files(START, folder)
    run_command("python make_model.py && python make_rows.py", folder)
    write_files(DOCS / "how-to-sft.md", folder)
    run_command("python sft.py", folder)
    return folder


@pytest.fixture
def server(start: Path) -> Iterator[str]:
    """The URL of a vLLM server's stand-in with the model that the page about SFT makes."""
    urls: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with FakeVLLMServer(start / "sft-model") as running:
            urls.append(running.url)
            ready.set()
            await trio.to_thread.run_sync(done.wait)

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(60)
    yield urls[0]
    done.set()
    thread.join(60)


def check_page(page: Path, folder: Path, variables: dict[str, str] | None = None, *, cold: bool = False) -> None:
    """Run the commands of a page in their order; cold: as run_command."""
    assert write_files(page, folder) or page.name == "how-to-lora.md"
    commands = list(list_commands(page))
    assert any(command.printed for command in commands), f"{page.name} shows nothing of what is printed"
    for command in commands:
        printed = run_command(command.script, folder, variables, cold=cold)
        missing = find_missing(command.printed or "", printed)
        assert not missing, f"{page.name}: {command.script}did not print {missing}, but\n{printed}"


def test_there_is_a_page_for_each_way_to_train():
    assert {page.stem.removeprefix("how-to-") for page in PAGES} == NAMES
    for page in PAGES:
        assert "def test_" not in page.read_text(), f"{page.name} shows tests, and not what a user writes"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_says(page: Path, start: Path, tmp_path: Path, request: pytest.FixtureRequest):
    folder = tmp_path / "work"
    shutil.copytree(start, folder)
    url = {"URL": request.getfixturevalue("server")} if page.stem == "how-to-servers" else None
    check_page(page, folder, url)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_command_of_verl_becomes_one_here(start: Path, tmp_path: Path):
    shutil.copytree(start, tmp_path / "work")
    check_page(DOCS / "coming-from-verl.md", tmp_path / "work")


@needs.TRL
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_run_of_trl_and_of_this_project_come_to_about_the_same_accuracy(start: Path, tmp_path: Path):
    folder = tmp_path / "work"
    shutil.copytree(start, folder)
    check_page(DOCS / "coming-from-trl.md", folder)
    measured = run_command("python measure.py sft-model trl-model runs/moved/rl/checkpoints/step_0008", folder)
    before, theirs, ours = (float(number) for number in re.findall(r": (\d\.\d+) of 256", measured))
    assert min(theirs, ours) > before + 0.15 and abs(theirs - ours) < 0.15, measured


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_and_data_of_ones_own_go_from_nothing_to_curves(start: Path, tmp_path: Path):
    folder = tmp_path / "work"
    shutil.copytree(start, folder)
    (command,) = (command for command in list_commands(START) if "rollouts train" in command.script)
    assert len(command.script.splitlines()) + 4 < 15, "the reward has four lines"
    check_page(START, folder, cold=True)
    assert (folder / "runs" / "mine" / "curves.png").stat().st_size > 5000


def test_a_line_that_was_not_printed_is_missed():
    printed = "RL     1/8  reward 0.31  lr 1e-4\nafter RL  0.92  #####\ncurves: x\n"
    assert find_missing("RL 8/8  reward 0.99  lr 3.0e-04\n...\nafter RL 1.0 ##\n", printed) == []
    assert find_missing("curves: x\nafter RL 1.0\n", printed) == ["after RL 1.0"], "the order counts"
    assert find_missing("after SFT 1.0\n", printed) == ["after SFT 1.0"]
    assert normalize("a -0.5 +") == "a N"
