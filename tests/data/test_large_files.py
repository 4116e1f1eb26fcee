"""Data that is not in memory: a file larger than the memory that its rows may take, and data sets of the hub from local files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import needs
import pytest
from forked import run
from huggingface_hub import get_session

from rollouts.data.rows.hub import limit_requests

MEASURE = """
import resource, sys
from rollouts.data.datasets import DatasetSpec, load_rl_prompts
from rollouts.data.prompts import DataBuffer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

load_rl_prompts(DatasetSpec(path=sys.argv[2], lazy=True))
before = peak()
loaded = load_rl_prompts(DatasetSpec(path=sys.argv[1], lazy=sys.argv[3] == "lazy"))
buffer = DataBuffer(loaded.rows, seed=1)
taken = [prompt.metadata["n"] for prompt in buffer.get_prompts(500)]
print(len(loaded), round(peak() - before, 1), sum(taken), taken[:3])
"""


def measure(folder: Path, path: Path, how: str) -> list[str]:
    status, out, error = run(MEASURE, path, path.parent / "one.jsonl", how, folder=folder / how)
    assert status == 0, error[-2000:]
    return out.split()


def test_streamed_rows_take_a_fraction_of_their_file_in_memory_and_come_in_the_same_order(tmp_path: Path):
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for n in range(6_000):
            file.write(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1), "n": n, "notes": "x" * 8000}) + "\n")
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    size_mb = path.stat().st_size / 2**20
    num, lazy_mb, *lazy = measure(tmp_path, path, "lazy")
    _, whole_mb, *whole = measure(tmp_path, path, "whole")
    assert num == "6000" and lazy == whole
    assert size_mb > 40 and float(whole_mb) > size_mb and float(lazy_mb) < 12, (size_mb, whole_mb, lazy_mb)


HUB = """
import sys
from rollouts.data.datasets import DatasetSpec, load_rl_prompts
from rollouts.errors import DataError

for name in sys.argv[1:]:
    for lazy in (False, True):
        try:
            loaded = load_rl_prompts(DatasetSpec(path=name, lazy=lazy))
        except DataError as error:
            print("refused", error)
        else:
            print(len(loaded), loaded.sources[1], loaded[1].content)
"""


SILENT = """
import http.server, os, socketserver, sys, threading, time

class Answers(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        if sys.argv[1] == "at once":
            time.sleep(1000)
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()

    def do_GET(self):
        time.sleep(1000)

socketserver.ThreadingTCPServer.daemon_threads = True
server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
from rollouts.data.rows.files import find_rows
from rollouts.errors import DataError
try:
    find_rows("hf://org/sums").index()
except DataError as error:
    print(error)
"""


@needs.DATASETS
@pytest.mark.parametrize("when", ["at once", "after its first answer"])
def test_a_hub_of_data_that_never_answers_is_given_up_with_the_variable(when: str, tmp_path: Path):
    """The packages would repeat the first request for minutes, and wait for the second without end."""
    own = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_DATASETS_CACHE": str(tmp_path / "made"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | own
    done = subprocess.run([sys.executable, "-c", SILENT, when], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("hf://org/sums cannot be loaded: the hub http://127.0.0.1:"), done.stdout + done.stderr[-2000:]
    assert "answered" in done.stdout and "within 1 s (HF_HUB_DOWNLOAD_TIMEOUT)" in done.stdout


def test_threads_that_ask_a_hub_for_the_same_at_once_are_answered():
    """Files of a model are downloaded so: each asks for the one token of its storage."""
    num = 6
    all_have_asked = threading.Barrier(num, timeout=30)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            all_have_asked.wait()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server, ThreadPoolExecutor(num) as threads:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}/token"
        try:
            with limit_requests():
                answers = [threads.submit(get_session().get, address) for _ in range(num)]
                assert [answer.result().status_code for answer in answers] == [200] * num
        finally:
            server.shutdown()


def test_limits_of_requests_that_overlap_leave_nothing_behind():
    before = {kind: list(hooks) for kind, hooks in get_session().event_hooks.items()}
    first, second = limit_requests(), limit_requests()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [len(hooks) for hooks in get_session().event_hooks.values()] == [len(hooks) + 1 for hooks in before.values()]
    second.__exit__(None, None, None)
    assert get_session().event_hooks == before


@needs.DATASETS
def test_a_data_set_of_the_hub_is_read_from_the_local_cache_without_network(tmp_path: Path):
    """The layout of the hub's cache: refs name a revision, whose files are in snapshots."""
    root, revision = tmp_path / "hub" / "datasets--org--sums", "a" * 40
    files = root / "snapshots" / revision / "data"
    files.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(revision)
    for split, count in (("train", 6), ("test", 3)):
        rows = ({"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(count))
        (files / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_DATASETS_CACHE": str(tmp_path / "made"), "HF_HUB_OFFLINE": "1"}
    names = ["hf://org/sums", "hf://org/sums:test", f"hf://org/sums@{revision}:train", "hf://org/other", "hf://org/sums:dev"]
    done = subprocess.run([sys.executable, "-c", HUB, *names], capture_output=True, text=True, env={**os.environ, **own}, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[::2] == lines[1::2], "read at once, and row by row"
    assert lines[0:6:2] == [
        "6 hf://org/sums, row 1 1+1=",
        "3 hf://org/sums:test, row 1 1+1=",
        f"6 hf://org/sums@{revision}:train, row 1 1+1=",
    ]
    assert "refused hf://org/other is not in the local cache, and HF_HUB_OFFLINE is set" in lines[6] and "HF_HUB_OFFLINE=0" in lines[6]
    assert lines[8].startswith("refused hf://org/sums:dev cannot be loaded") and "['train', 'test']" in lines[8]
