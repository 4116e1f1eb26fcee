"""The commands of pages begin at once in tests, and do what they do in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import needs
import pytest
from forked import PATIENCE_S
from warm_commands import find_programs

pytestmark = needs.LINUX

TELL = """
import os, sys
print(sys.argv, __name__, os.getcwd(), os.environ["OWN"], sys.stdin.read(), "torch" in sys.modules, sys.modules["__main__"].TOLD)
"""


def start(folder: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    programs = find_programs()
    assert programs is not None
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OWN": "own", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [str(programs / command[0]), *command[1:]], cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def run(folder: Path, *command: str, text: str = "", **variables: str) -> tuple[int, str, str]:
    process = start(folder, *command, **variables)
    out, error = process.communicate(text, timeout=PATIENCE_S)
    return process.returncode, out, error


def test_a_script_has_its_arguments_folder_environment_and_input_and_has_everything_imported(tmp_path: Path):
    (tmp_path / "tell.py").write_text(f"TOLD = 7\n{TELL}")
    assert run(tmp_path, "python", "tell.py", "a b", text="in") == (0, f"['tell.py', 'a b'] __main__ {tmp_path} own in True 7\n", "")


@pytest.mark.parametrize(
    ("code", "status", "out", "error"),
    [
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", ""),
        ("import forked", 1, "", "ModuleNotFoundError: No module named 'forked'\n"),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0, "late\n", ""),
        ("import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join()", 0, "\n", ""),
        ("import os, torch; print(torch.get_num_threads(), os.system('echo a'))", 0, "a\n3 0\n", ""),
    ],
)
def test_the_end_of_a_script_is_that_of_its_process(code: str, status: int, out: str, error: str, tmp_path: Path):
    (tmp_path / "end.py").write_text(code)
    found = run(tmp_path, "python", "end.py", OMP_NUM_THREADS="3")
    assert found[:2] == (status, out), found[2]
    assert found[2].endswith(error) and bool(found[2]) == bool(error)


def test_a_command_of_the_project_is_run_and_what_is_no_script_has_a_process_of_its_own(tmp_path: Path):
    root = str(Path(__file__).parents[2])
    status, out, _ = run(tmp_path, "rollouts", "train", "--mode", "sft+rl", "--dry-run", PYTHONPATH=root)
    assert status == 0 and "parameters" in out
    status, out, _ = run(tmp_path, "python", "-c", "import sys; print('torch' in sys.modules)")
    assert (status, out) == (0, "False\n")
    assert run(tmp_path, "python", "no_such_file.py")[0] == 2
    assert "\nusage: rollouts " in "\n" + run(tmp_path, "rollouts", "train", "--help", PYTHONPATH=root)[1]


def test_a_command_that_cannot_begin_ends_with_the_reason_and_the_server_goes_on(tmp_path: Path):
    (tmp_path / "pid.py").write_text("import os; print(os.getppid())")
    server = run(tmp_path, "python", "pid.py")
    status, out, error = run(tmp_path, "python", "pid.py", OMP_NUM_THREADS="many")
    assert (status, out) == (1, "") and error.endswith("invalid literal for int() with base 10: 'many'\n")
    assert [run(tmp_path, "python", "pid.py") for _ in range(3)] == 3 * [server]  # a second server would answer some


def test_signals_reach_a_command_and_it_ends_with_what_started_it(tmp_path: Path):
    (tmp_path / "wait.py").write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print(os.getpid(), flush=True)\ntime.sleep(1000)\n"
    )
    for number, expected in ((signal.SIGTERM, 5), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = start(tmp_path, "python", "wait.py")
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == expected
        process.communicate()
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"process {pid} stays behind"
            time.sleep(0.01)


@pytest.mark.slow
def test_the_server_ends_with_the_tests():
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nimport warm_commands\nprint(warm_commands.find_programs(), flush=True)\n"
        "print([child.pid for child in __import__('multiprocessing').active_children()], flush=True)\n__import__('os')._exit(0)\n"
    )
    support = str(Path(__file__).parents[1] / "support")
    done = subprocess.run([sys.executable, "-c", code, support], capture_output=True, text=True, timeout=PATIENCE_S)
    pids = [int(pid) for pid in done.stdout.splitlines()[1].strip("[]").split(",")]
    assert pids, done.stderr
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} stay behind"
        time.sleep(0.05)
