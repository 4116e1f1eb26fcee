"""Loggers of the command line, against the real packages: what they wrote is read back, also of a run that was interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest
from test_train import SMALL

from integration.expressions.loggers import MarkedLogger, RunIdentity, check_loggers, create_loggers, parse_loggers
from integration.train import main
from rollouts.errors import ConfigError
from rollouts.training.logs import continued
from rollouts.training.logs.continued import ContinuedLogger
from rollouts.training.logs.wandb_files import read_offline_steps, split_records
from rollouts.training.metrics import read_metrics
from rollouts.types import Sample

Curve = list[tuple[int, float]]
Reader = Callable[[Path, str], Curve]
RUN = [*SMALL, "--sft.num-steps", "2", "--evaluation.num-prompts", "4", "--quiet"]


def read_tensorboard(folder: Path, name: str) -> Curve:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Curve = []
    for file in sorted((folder / "run" / "loggers" / "tensorboard").glob("events*")):
        events = EventAccumulator(str(file)).Reload()
        found += [(event.step, event.value) for event in events.Scalars(name)] if name in events.Tags()["scalars"] else []
    return found


def read_mlflow(folder: Path, name: str) -> Curve:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_name == "run"
    assert run.data.params["seed"] == "0" and run.data.params["sft.optimizer.lr"] == "0.002"
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def read_trackio(folder: Path, name: str) -> Curve:
    from trackio.sqlite_storage import SQLiteStorage

    stage = name.partition("/")[0]
    return [(int(line[f"{stage}/step"]), float(line[name])) for line in SQLiteStorage.get_logs("mine", "run") if name in line]


def read_records(path: Path) -> list[bytes]:
    """The records of one of wandb's files: LevelDB's log format behind a header of 7 bytes."""
    data, position, records, parts = path.read_bytes(), 7, list[bytes](), list[bytes]()
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(b"".join(parts))
            parts = []
    return records


def read_wandb(folder: Path, name: str) -> Curve:
    """The lines in wandb's offline files, of all parts of the run, which has one id."""
    from wandb.proto import wandb_internal_pb2

    stage, found, ids = name.partition("/")[0], list[tuple[int, float]](), set[str]()
    for file in sorted((folder / "run" / "loggers" / "wandb").glob("offline-run-*/*.wandb")):
        for data in read_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if name in row:
                found.append((int(row[f"{stage}/step"]), float(row[name])))
    assert len(ids) == 1, ids
    return found


MLFLOW_CALL = "mlflow('mine', tracking_uri='sqlite:///FOLDER/mlflow.db')"
CASES = [
    pytest.param("tensorboard", read_tensorboard, marks=[needs.TENSORBOARD, pytest.mark.more], id="tensorboard"),
    pytest.param(MLFLOW_CALL, read_mlflow, marks=[needs.MLFLOW, pytest.mark.more], id="mlflow"),
    pytest.param("trackio('mine')", read_trackio, marks=[needs.TRACKIO, pytest.mark.more], id="trackio"),
    pytest.param("wandb('mine')", read_wandb, marks=[needs.WANDB, pytest.mark.more], id="wandb"),
]


@pytest.fixture(autouse=True)
def stay_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow keeps the files of a run in the working directory
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if needs.TRACKIO.args == (False,):
        monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=False)
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=False)


@pytest.mark.parametrize(("logger", "read"), CASES)
def test_a_run_that_was_interrupted_has_one_curve_without_gap_or_duplicate(tmp_path: Path, logger: str, read: Reader):
    """The second part begins a step before the last line, as after a kill behind that line's checkpoint."""
    arguments = [*RUN, "--rl.num-steps", "2", "--output-dir", str(tmp_path / "run"), "--log", logger.replace("FOLDER", str(tmp_path))]
    assert main(arguments) == 0
    shutil.rmtree(tmp_path / "run" / "rl" / "checkpoints" / "step_0002")
    assert main(["--output-dir", str(tmp_path / "run"), "--resume", "--rl.num-steps", "4", "--quiet"]) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for name in ("sft/loss", "sft/eval_loss", "rl/reward_mean", "rl/entropy"):
        stage, _, key = name.partition("/")
        expected = [(line["step"], line[key]) for line in lines if line["stage"] == stage and key in line]
        found = sorted(read(tmp_path, name))
        assert [step for step, _ in found] == [step for step, _ in expected], name
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6), name


@pytest.mark.parametrize(("logger", "read"), [case for case in CASES if case.id in ("tensorboard", "mlflow")])
def test_lines_that_a_store_has_lost_are_written_again(tmp_path: Path, logger: str, read: Reader):
    """A logger that is new in the second part gets the lines of the first one."""
    arguments = [*RUN, "--rl.num-steps", "1", "--output-dir", str(tmp_path / "run")]
    assert main(arguments) == 0
    more = ["--rl.num-steps", "2", "--log", logger.replace("FOLDER", str(tmp_path))]
    assert main(["--output-dir", str(tmp_path / "run"), "--resume", "--quiet", *more]) == 0
    assert [step for step, _ in read(tmp_path, "sft/loss")] == [1, 2]
    assert [step for step, _ in read(tmp_path, "rl/reward_mean")] == [1, 2]


@pytest.mark.more
@needs.TENSORBOARD
def test_rollouts_are_shown_as_a_table(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main([*RUN, "--mode", "rl", "--rl.num-steps", "1", "--output-dir", str(tmp_path / "run"), "--log", "tensorboard"]) == 0
    (file,) = (tmp_path / "run" / "loggers" / "tensorboard").glob("events*")
    events = EventAccumulator(str(file)).Reload()
    (table,) = events.Tensors("rl/samples/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert text.startswith("| step | prompt | response | reward |") and text.count("| s") >= 8
    assert '"seed": 0' in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()


class Failing:
    def log(self, metrics: Any, step: int) -> None:
        raise ConnectionError("no route to https://me:secret@host/")

    def finish(self) -> None:
        raise ConnectionError("still none")


def test_a_logger_that_fails_is_said_once_without_secrets_and_ends_nothing(caplog: pytest.LogCaptureFixture):
    logger = ContinuedLogger(Failing, "mine:failing")
    for step in range(3):
        logger.log({"loss": 1.0}, step)
    logger.finish()
    (record,) = caplog.records
    assert "mine:failing failed in log (ConnectionError: no route" in record.getMessage()
    assert "secret" not in record.getMessage()


class Remembering:
    """A store with the lines of an earlier run under the same name."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def last_steps(self) -> dict[str, int]:
        return {"rl": 5}

    def log(self, metrics: Any, step: int) -> None:
        self.steps.append(step)

    def finish(self) -> None:
        self.steps.append(-1)


@pytest.mark.parametrize(("earlier", "expected"), [(None, [4, 5, 6]), ([], [6]), ([{"stage": "rl", "step": 3}], [6])])
def test_only_a_resumed_run_leaves_out_the_lines_that_the_store_has(earlier: Any, expected: list[int]):
    """A new run may have the name or the directory of another one, whose lines are not its own."""
    store = Remembering()
    logger = ContinuedLogger(lambda: store, "mine", earlier)  # pyright: ignore[reportArgumentType]
    for step in (4, 5, 6):
        logger.log({"stage": "rl", "loss": 1.0}, step)
    logger.finish()
    assert store.steps == [*expected, -1]


def test_a_logger_that_hangs_is_given_up_and_the_lines_that_it_has_not_got_are_counted(caplog: pytest.LogCaptureFixture):
    """The first line comes back late, or never: the later ones wait for a while, and at the end all of them are counted."""
    begun, go_on, got = threading.Event(), threading.Event(), list[int]()

    class Hanging(Remembering):
        def log(self, metrics: Any, step: int) -> None:
            got.append(step)
            begun.set()
            go_on.wait()

    logger = ContinuedLogger(Hanging, "mine:hanging", timeout_s=2.0)
    for step in range(5):
        logger.log({"loss": 1.0}, step)
        assert begun.wait(60)
    logger.finish()
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("the logger mine:hanging has not returned from log within 2 s (--logger-timeout-s) and is given up")
    assert told[1:] == ["the logger mine:hanging has not got 5 of 5 lines of this run"]
    go_on.set()
    for worker in [thread for thread in threading.enumerate() if thread.name == "logger mine:hanging"]:
        worker.join(60)
        assert not worker.is_alive()
    assert got == [0]  # nothing is logged after the end of the run


@pytest.mark.parametrize("where", ["its start", "finish"])
def test_a_logger_that_does_not_start_or_end_holds_up_nothing(where: str, caplog: pytest.LogCaptureFixture):
    go_on = threading.Event()

    class Hanging(Remembering):
        def __init__(self) -> None:
            super().__init__()
            if where == "its start":
                go_on.wait()

        def finish(self) -> None:
            go_on.wait()

    logger = ContinuedLogger(Hanging, "mine:hanging", timeout_s=2.0)
    logger.finish()
    go_on.set()
    assert f"has not returned from {where} within 2 s" in caplog.records[0].getMessage()


def test_a_logger_whose_queue_is_full_at_the_end_is_given_up_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(continued, "_MOST_WAITING", 2)
    monkeypatch.setattr(continued, "_PROMPT_S", 0.1)
    released = threading.Event()

    class Hanging(Remembering):
        def log(self, metrics: Any, step: int) -> None:
            released.wait(60)

    logger = ContinuedLogger(Hanging, "mine:hanging", timeout_s=1.0)
    for step in range(3):
        logger.log({"loss": 0.5}, step)
    logger.finish()
    released.set()
    assert [record.message for record in caplog.records if "is given up" in record.message] == [caplog.records[0].message]
    assert caplog.records[-1].message.endswith("has not got 3 of 3 lines of this run")


def test_a_slow_logger_gets_every_line_in_order_while_the_run_goes_on(caplog: pytest.LogCaptureFixture):
    go_on, store = threading.Event(), Remembering()

    class Slow(Remembering):
        def log(self, metrics: Any, step: int) -> None:
            go_on.wait()
            store.log(metrics, step)

    logger = ContinuedLogger(Slow, "mine:slow", timeout_s=60)
    for step in range(20):
        logger.log({"loss": 1.0}, step)
    assert store.steps == []
    go_on.set()
    logger.finish()
    assert store.steps == list(range(20)) and not caplog.records


OF_A_SOCKET = """
import urllib.request

class Poster:
    def log(self, metrics, step):
        urllib.request.urlopen("http://127.0.0.1:PORT/", data=b"line")

    def finish(self):
        pass
"""


def test_a_run_ends_although_the_server_of_its_logger_never_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "own.py").write_text(OF_A_SOCKET.replace("PORT", str(silent.getsockname()[1])))
        more = ["--log", f"{tmp_path}/own.py:Poster", "--logger-timeout-s", "3"]
        assert main([*RUN, "--mode", "sft", "--output-dir", str(tmp_path / "run"), *more]) == 0
    told = capsys.readouterr().err
    assert "own.py:Poster has not returned from log within 3 s (--logger-timeout-s)" in told
    assert "has not got 3 of 3 lines of this run" in told
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3
    assert "(--logger-timeout-s)" in (tmp_path / "run" / "warnings.jsonl").read_text()


@needs.MLFLOW
def test_a_logger_that_cannot_start_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    expression = "mlflow(tracking_uri='sqlite:////proc/no/such/place.db')"
    assert main([*RUN, "--mode", "sft", "--output-dir", str(tmp_path / "run"), "--log", expression]) == 0
    assert "failed in its start" in capsys.readouterr().err


@pytest.mark.parametrize("expression", ["mlflow(tracking_uri='http://me:word@host/')", "own:logger(api_key='x')"])
def test_secrets_are_refused_among_the_arguments(expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.py").write_text("def logger(api_key):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has a secret in the argument .*MLFLOW_TRACKING_PASSWORD") as raised:
        parse_loggers([expression])
    assert "word@" not in str(raised.value)


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("wandb", "tensorboard", "trackio", "mlflow"):
        with pytest.raises(ConfigError, match=rf"needs the package {name}: pip install 'rollouts-rl\[{name}\]'"):
            check_loggers([name])


def test_lines_that_weights_and_biases_may_not_have_written_are_logged_again_after_a_kill(tmp_path: Path):
    class Run:
        def log(self, metrics: Any, step: int) -> None: ...
        def finish(self) -> None: ...

    run: Any = Run()
    now, path = [0.0], tmp_path / "steps.json"
    logger = MarkedLogger(run, path, clock=lambda: now[0])
    for seconds, stage, step in ((0, "sft", 1), (10, "sft", 2), (35, "rl", 1), (45, "rl", 2)):
        now[0] = seconds
        logger.log({"stage": stage}, step)
    assert MarkedLogger(run, path).last_steps() == {"sft": 2}, "the lines of RL are not half a minute old"
    logger.finish()
    assert MarkedLogger(run, path).last_steps() == {"sft": 2, "rl": 2}
    left = MarkedLogger(run, path, stored={"rl": 1})  # `wandb sync --clean` has removed the part with SFT; that of RL is cut
    assert left.last_steps() == {"sft": 2, "rl": 1}


KILLED = """
import os, sys, time
from pathlib import Path
from integration.expressions.loggers import MarkedLogger, RunIdentity, create_loggers
(logger,) = create_loggers(["wandb('mine')"], RunIdentity(directory=Path("run"), settings={}))
for step in (1, 2, 3):
    logger.log({"stage": "rl", "reward_mean": step / 4}, step)
os.kill(os.getpid(), 9)
"""


@needs.WANDB
@pytest.mark.more
def test_a_killed_run_has_each_line_once_in_the_offline_files_of_weights_and_biases(tmp_path: Path):
    root = str(Path(__file__).parents[2])
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # that of other tests, which is not killed
    environment = own | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment, check=False).returncode == -signal.SIGKILL
    earlier = [{"step": step, "stage": "rl", "reward_mean": step / 4} for step in (1, 2, 3)]
    (logger,) = create_loggers(["wandb('mine')"], RunIdentity(directory=tmp_path / "run", settings={}, earlier=earlier))
    logger.log({"stage": "rl", "reward_mean": 1.0}, 4)
    logger.finish()
    assert sorted(read_wandb(tmp_path, "rl/reward_mean")) == [(step, step / 4) for step in (1, 2, 3, 4)]


@needs.WANDB
@pytest.mark.more
def test_offline_files_of_weights_and_biases_are_read_up_to_where_a_kill_cut_them(tmp_path: Path):
    (logger,) = create_loggers(["wandb('mine')"], RunIdentity(directory=tmp_path / "run", settings={"long": "x" * 70_000}))
    for step in (1, 2, 3):  # the lines fill blocks of 32 KiB beyond their ends
        logger.log({"stage": "sft", "loss": step / 4} | {f"metric_{k}": float(k) for k in range(2000)}, step)
    logger.log_samples((Sample(tokens=(1, 2), loss_mask=(0.0, 1.0), response="b"),), 4, "sft")  # a table alone is no line
    logger.finish()
    files = tmp_path / "run" / "loggers" / "wandb"
    (file,) = files.glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert read_offline_steps(files) == {"sft": 3} and list(split_records(data)) == read_records(file)
    for size, expected in ((len(data) // 2, 1), (7, None), (3, None), (0, None)):
        file.write_bytes(data[:size])
        found = read_offline_steps(files)
        assert found == {} if expected is None else found is not None and 1 <= found["sft"] <= 3, size
    file.write_bytes(data[:7] + b"\x05" * 400)
    assert read_offline_steps(files) == {}, "another kind of record"
    file.write_bytes(data[:7] + struct.pack("<IHB", 0, 4, 1) + b"\xff" * 4)
    assert read_offline_steps(files) is None, "records of another kind: the marks count"
    file.write_bytes(data)
    (files / "run-20260101_000000-abcdefgh").mkdir()
    assert read_offline_steps(files) is None, "a part of the run has gone to a server"
    assert read_offline_steps(tmp_path / "none") == {}


def test_the_loggers_before_one_that_cannot_be_called_are_finished(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "class Kept:\n"
        "    def log(self, metrics, step): pass\n"
        f"    def finish(self): Path({str(tmp_path / 'finished')!r}).touch()\n"
        "def keep(): return Kept()\n"
        "def fail(): raise ValueError('no key')\n"
    )
    identity = RunIdentity(directory=tmp_path / "a", settings={})
    before = threading.active_count()
    with pytest.raises(ConfigError, match="raised ValueError: no key"):
        create_loggers([f"{tmp_path}/mine.py:keep", f"{tmp_path}/mine.py:fail"], identity)
    assert (tmp_path / "finished").exists()
    for thread in threading.enumerate():
        if thread.name.startswith("logger "):
            thread.join(10.0)
    assert threading.active_count() <= before


def test_a_users_logger_gets_every_line_of_a_resumed_run_from_there_on(tmp_path: Path):
    identity = RunIdentity(directory=tmp_path / "a", settings={}, earlier=[{"step": 1, "stage": "sft", "loss": 1.0}])
    (logger,) = create_loggers([f"jsonl('{tmp_path}/copy.jsonl')"], identity)
    logger.log({"stage": "sft", "loss": 0.5}, 2)
    logger.finish()
    assert [line["step"] for line in read_metrics(tmp_path / "copy.jsonl")] == [2]  # its file appends, and knows no run


PAGE = Path(__file__).parents[2] / "docs" / "loggers.md"


def test_the_commands_and_the_code_of_the_page_are_understood():
    import re
    import shlex

    from integration.settings.command_line import parse_command_line

    text = PAGE.read_text()
    commands = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("rollouts train ")]
    assert [len(parse_command_line(command).config.loggers) for command in commands if "my_loggers.py:to_slack" not in command] == [1, 2]
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    logger = names["create_printer"]()
    logger.log({"stage": "rl", "loss": 0.5}, 3)
    assert logger.lines == ["rl 3: 0.500"]
