"""Engines by name, their blocking shells, and the thread that these hold."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from rollouts import BlockingCallError, EngineError, SamplingParams, create_char_tokenizer, create_tiny_model
from rollouts.errors import ConfigError
from rollouts.testing import FakeSGLangServer, FakeVLLMServer
from rollouts.trainer import (
    BaseEnvironment,
    BatchInferenceManager,
    BlockingEngine,
    ConfigStore,
    InferenceConfig,
    ModelConfig,
    MultiTurnInferenceEngine,
    create_inference_engine,
    open_text_engine,
)
from rollouts.trainer.loop_thread import LoopThread

SERVERS = {"vllm": FakeVLLMServer, "sglang": FakeSGLangServer}
CPU = ModelConfig(device="cpu")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    create_tiny_model().save_pretrained(path)
    create_char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[BlockingEngine]:
    with create_inference_engine(model_path, "local", ConfigStore(model=CPU, inference=InferenceConfig(max_tokens=6))) as engine:
        yield engine


PROMPTS = ["1+1=", "23+4=", "s514="]


def test_generate_gives_texts_and_a_padded_array(engine: BlockingEngine):
    texts = engine.generate(prompts=PROMPTS, max_tokens=5, temperature=0.0, top_p=1.0)
    assert len(texts.sequences) == 3 and all(isinstance(text, str) for text in texts.sequences)
    assert texts.tokens.shape == (3, max(texts.lengths))
    for row, text, length in zip(texts.tokens, texts.sequences, texts.lengths, strict=True):
        assert engine.tokenizer.decode(row[:length].tolist(), skip_special_tokens=True) == text


def test_each_sampling_setting_is_honored(engine: BlockingEngine, model_path: Path):
    assert engine.config.max_tokens == 6
    assert all(length <= 6 for length in engine.generate(PROMPTS, temperature=0.0).lengths)
    assert all(length <= 2 for length in engine.generate(PROMPTS, max_tokens=2).lengths)
    greedy = engine.generate(PROMPTS, temperature=0.0).sequences
    assert greedy == engine.generate(PROMPTS, temperature=0.0).sequences
    assert greedy == engine.generate(PROMPTS, temperature=3.0, top_p=1e-6).sequences  # only the most probable token is left
    sampled = engine.generate(PROMPTS, temperature=3.0, seed=5).sequences
    assert sampled == engine.generate(PROMPTS, temperature=3.0, seed=5).sequences != greedy
    with create_inference_engine(
        model_path, config=ConfigStore(model=CPU, inference=InferenceConfig(temperature=0.0, max_tokens=6))
    ) as own:
        assert own.generate(PROMPTS).sequences == greedy


def test_one_text_is_no_list_of_prompts(engine: BlockingEngine):
    with pytest.raises(ConfigError, match=r"prompts is the text '1\+1=', expected a list of prompts: give \['1\+1='\]"):
        engine.generate(prompts="1+1=")


def test_dtype_and_length_reach_the_embedded_engine(model_path: Path):
    config = ConfigStore(model=ModelConfig(device="cpu", dtype="bfloat16"), inference=InferenceConfig(max_model_len=6, max_tokens=20))
    with create_inference_engine(model_path, "local", config) as engine:
        inner: Any = engine.thread.value.engine
        assert {p.dtype for p in inner._model.parameters()} == {torch.bfloat16}
        assert engine.generate(["123"], temperature=0.0).lengths[0] <= 3


async def test_engines_by_name_give_the_same_greedy_answer(model_path: Path):
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    answers = []
    async with open_text_engine(model_path, "local", ConfigStore(model=CPU)) as engine:
        answers.append((await engine.engine.generate((5, 6, 7), greedy)).output_tokens)
    for kind, server_type in SERVERS.items():
        async with server_type(model_path) as server:
            config = InferenceConfig(backend=kind, url=server.url)  # type: ignore[arg-type]
            async with open_text_engine(model_path, config=config) as engine:
                answers.append((await engine.engine.generate((5, 6, 7), greedy)).output_tokens)
                assert (await engine.generate(["1+1="], max_tokens=3)).sequences
    assert answers[0] == answers[1] == answers[2]


def test_an_engine_that_is_not_known_or_cannot_be_is_refused(model_path: Path):
    before = set(threading.enumerate())
    two = ConfigStore(model=ModelConfig(tensor_parallel_size=2))
    for arguments, message in (
        ((model_path, "vlm"), "unknown engine 'vlm': did you mean 'vllm'"),
        ((model_path, "local", two), "tensor_parallel_size is 2, but the embedded engine runs on one device"),
        ((model_path, "sglang", two), "tensor_parallel_size is 2, but the server would run on the CPU"),
        ((), "there is no model"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_inference_engine(*arguments)
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name == "create_inference_engine"]


# -- batches


def test_a_batch_keeps_the_order_and_reports_a_failure_of_each_prompt_alone(engine: BlockingEngine):
    manager = BatchInferenceManager(engine, batch_size=2)
    prompts = [*PROMPTS, "9" * 600, "7-2="]  # the fourth is longer than the context; five prompts are two batches and a half
    texts = manager.generate_batch(prompts, max_tokens=4, temperature=0.0)
    assert list(texts.errors) == [3]
    assert isinstance(texts.errors[3], EngineError)
    alone = [engine.generate([prompt], max_tokens=4, temperature=0.0).sequences[0] for prompt in [*PROMPTS, "7-2="]]
    assert [text for i, text in enumerate(texts.sequences) if i != 3] == alone
    assert texts.sequences[3] == ""
    with pytest.raises(ConfigError, match="batch_size is 0"):
        BatchInferenceManager(engine, batch_size=0)


# -- conversations


class Echo(BaseEnvironment):
    """Ends after three actions, each rewarded by 1."""

    def reset(self) -> str:  # type: ignore[override]
        self.actions: list[str] = []
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.actions.append(action)
        return "more", 1.0, len(self.actions) == 3, {}


def test_a_conversation_goes_on_from_the_tokens_that_were_sampled(engine: BlockingEngine):
    chat = MultiTurnInferenceEngine(engine, max_turns=2, system_prompt="be brief.")
    first = chat.step(chat.start_conversation("1+1=", seed=3))
    second = chat.step(first, "2+2=")
    assert second.transcript.tokens[: len(first.transcript.tokens)] == first.transcript.tokens
    assert (
        first.last is not None
        and first.last.tokens == second.transcript.tokens[len(first.transcript.tokens) - len(first.last.tokens) :][: len(first.last.tokens)]
    )
    assert chat.format_conversation(second).startswith("system: be brief.\nuser: 1+1=\nassistant: ")
    assert second.num_turns == 2


def test_an_episode_is_played_in_a_class_or_in_a_copy_of_an_object(engine: BlockingEngine):
    chat = MultiTurnInferenceEngine(engine)
    environment = Echo()
    for given in (Echo, environment, lambda: Echo()):
        episode = chat.run_episode(given, seed=1)
        assert (len(episode.steps), episode.total_reward) == (3, 3.0)
    assert not hasattr(environment, "actions")


# -- the thread


@asynccontextmanager
async def open_text(log: list[str], delay_s: float = 0.0, *, fail: str = "") -> AsyncGenerator[str]:
    if fail == "open":
        raise EngineError("it does not open")
    log.append("open")
    try:
        if fail == "later":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_with_an_error)
                yield "text"
        else:
            yield "text"
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(delay_s)
        log.append("close")
    if fail == "close":
        raise EngineError("it does not close")


async def end_with_an_error() -> None:
    await trio.sleep(0.05)
    raise EngineError("the server died")


def create_thread(log: list[str], **options: Any) -> LoopThread[str]:
    return LoopThread(open_text(log, **options), "Text", "async with open_text()")


async def shout(text: str) -> str:
    await trio.sleep(0)
    return text.upper()


async def refuse(text: str) -> str:
    raise ValueError(f"not {text}")


def test_a_thread_holds_a_context_manager_open_between_calls():
    log: list[str] = []
    thread = create_thread(log)
    assert thread.call("shout()", shout, thread.value) == "TEXT"
    with pytest.raises(ValueError, match="not text"):
        thread.call("refuse()", refuse, "text")
    assert thread.call("shout()", shout, "after an error") == "AFTER AN ERROR"
    assert log == ["open"]
    thread.close()
    thread.close()
    assert log == ["open", "close"]
    assert not [other for other in threading.enumerate() if other.name == "Text"]
    for use in (lambda: thread.value, lambda: thread.call("shout()", shout, "x")):
        with pytest.raises(BlockingCallError, match="this Text was closed: create another one"):
            use()


async def test_inside_a_trio_loop_it_is_refused_and_the_remedy_is_named(engine: BlockingEngine):
    with pytest.raises(BlockingCallError, match=r"Text\(\.\.\.\) waits for its result.*write `async with open_text\(\)`"):
        create_thread([])
    with pytest.raises(BlockingCallError, match=r"create_inference_engine\.generate\(\) waits .* `async with open_text_engine"):
        engine.generate(["1+1="])
    assert await trio.to_thread.run_sync(lambda: engine.generate(["1+1="], max_tokens=1).lengths)  # a thread without a loop may wait


def test_errors_of_opening_and_closing_are_raised_and_leave_no_thread():
    with pytest.raises(EngineError, match="does not open"):
        create_thread([], fail="open")
    with pytest.raises(EngineError, match="does not close"):
        create_thread([], fail="close").close()
    assert not [other for other in threading.enumerate() if other.name == "Text"]


def test_a_call_beside_which_the_server_dies_raises_what_happened():
    log: list[str] = []
    thread = create_thread(log, fail="later")
    with pytest.raises(EngineError, match="the server died"):
        thread.call("sleep()", trio.sleep, 30)
    assert log == ["open", "close"]
    with pytest.raises((BlockingCallError, EngineError)):
        thread.call("shout()", shout, "x")
    with pytest.raises(EngineError, match="the server died"):
        thread.close()
    thread.close()


def test_calls_of_several_threads_run_beside_each_other_and_end_with_the_thread():
    thread = create_thread([])
    ended: list[str] = []

    def wait() -> None:
        try:
            thread.call("sleep()", trio.sleep_forever)
        except BlockingCallError as error:
            ended.append(str(error))

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for each in waiting:
        each.start()
    time.sleep(0.05)
    assert thread.call("shout()", shout, "beside") == "BESIDE"
    thread.close()
    for each in waiting:
        each.join(timeout=5)
    assert ended == ["this Text was closed: create another one"] * 3


def test_an_interrupt_cancels_the_call_and_leaves_the_thread_usable():
    thread = create_thread([])
    timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        thread.call("sleep()", trio.sleep_forever)
    timer.join()
    assert thread.call("shout()", shout, "on") == "ON"
    thread.close()


STAND_IN = """
import json, sys, trio
from rollouts.testing import FakeVLLMServer
async def serve():
    async with FakeVLLMServer(sys.argv[sys.argv.index("--model") + 1], port=int(sys.argv[sys.argv.index("--port") + 1])):
        await trio.sleep_forever()
print(json.dumps(sys.argv), flush=True)
trio.run(serve)
"""


def write_stand_in(folder: Path) -> Path:
    """An interpreter whose vLLM is a fake one that tells its arguments."""
    python = folder / "python"
    (folder / "server.py").write_text(STAND_IN)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "server.py"}" "$@"\n')
    python.chmod(0o755)
    return python


def find_port(log: Path) -> int:
    words = log.read_text().split('"')
    return int(words[words.index("--port") + 2])


def is_served(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_launched_server_lives_until_the_engine_is_closed(model_path: Path, tmp_path: Path):
    inference = InferenceConfig(backend="vllm", python=str(write_stand_in(tmp_path)), log_path=str(tmp_path / "log"), max_model_len=99)
    with create_inference_engine(model_path, config=ConfigStore(model=CPU, inference=inference)) as engine:
        port = find_port(tmp_path / "log")
        assert is_served(port)
        log = (tmp_path / "log").read_text()
        assert '"--max-model-len", "99"' in log and '"--dtype", "float32"' in log
        assert engine.config is not None
    assert not is_served(port)


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends_and_leaves_no_server(model_path: Path, tmp_path: Path):
    python = write_stand_in(tmp_path)
    program = f"""
        from rollouts.trainer import *
        inference = InferenceConfig(backend="vllm", python={str(python)!r}, log_path={str(tmp_path / "log")!r})
        engine = create_inference_engine({str(model_path)!r}, config=ConfigStore(model=ModelConfig(device="cpu"), inference=inference))
        print(engine.config.backend)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "vllm\n"), done.stderr[-2000:]
    deadline = time.monotonic() + 20
    while is_served(find_port(tmp_path / "log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_served(find_port(tmp_path / "log"))
