"""The difference between a rank and a stranger, with real sockets, real processes, and attackers."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import needs
import pytest
import rank_processes as jobs
import torch
from forked import PATIENCE_S
from rank_processes import script, start_ranks

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.ranks import channel as rank_channel
from rollouts.backends.ranks.channel import Channel, ChannelClosed, Listener, WrongToken, connect_to_leader
from rollouts.backends.ranks.meeting import choose_interface, find_address, read_placement, read_token
from rollouts.backends.ranks.values import DamagedError, NotPlainError, dump_value, load_value
from rollouts.config import OptimizerConfig
from rollouts.errors import BackendError, ConfigError
from rollouts.types import Status

TOKEN = b"a secret of the run that nobody else knows"


def accept_in_thread(listener: Listener, num_ranks: int = 2, timeout_s: float = PATIENCE_S) -> tuple[threading.Thread, list]:
    """Rank 0 waits for the others; what came of it stands in the list then."""
    found: list = []

    def accept() -> None:
        try:
            found.append(listener.accept(num_ranks, timeout_s=timeout_s))
        except BackendError as error:
            found.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    return thread, found


def dial(listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


# -- the proof


def test_both_ends_prove_the_token_and_none_shows_it(monkeypatch):
    listener, sent = Listener("127.0.0.1", TOKEN), bytearray()

    class Recording(socket.socket):
        def sendall(self, data, *flags) -> None:
            sent.extend(data)
            super().sendall(data, *flags)

    monkeypatch.setattr(socket, "socket", Recording)
    thread, found = accept_in_thread(listener)
    near = connect_to_leader("127.0.0.1", listener.port, TOKEN, 1, timeout_s=PATIENCE_S)
    thread.join()
    near.commands.send(b"from 1", PATIENCE_S)
    assert found[0][1].commands.receive(PATIENCE_S) == b"from 1"
    found[0][1].pulse.send(b"from 0", PATIENCE_S)
    assert near.pulse.receive(PATIENCE_S) == b"from 0"
    assert len(sent) > 200
    assert TOKEN not in sent
    listener.close()


@pytest.mark.parametrize("said", ["hello as the old version said it", "a pickle", "noise", "no such rank", "wrong proof"])
def test_who_does_not_prove_the_token_is_sent_away_and_nothing_of_it_is_unpickled(tmp_path: Path, said: str):
    listener, bomb = Listener("127.0.0.1", TOKEN), tmp_path / "bomb"
    thread, found = accept_in_thread(listener)
    stranger = dial(listener)
    hello = rank_channel._HELLO.pack(rank_channel._MAGIC, 9 if said == "no such rank" else 1, 0, bytes(32))
    data = pickle.dumps(jobs.Bomb(bomb))
    if said == "hello as the old version said it":
        stranger.sendall(struct.pack("!Q", 2**40) + TOKEN + b" 1 0")
    elif said == "a pickle":
        stranger.sendall(struct.pack("!Q", len(data)) + data + bytes(100))
    elif said == "noise":
        stranger.sendall(os.urandom(1000))
    else:
        stranger.sendall(hello)
        if said == "wrong proof":
            assert len(stranger.recv(64)) == 64
            stranger.sendall((data + bytes(32))[:32])
    assert is_closed(stranger)
    connect_to_leader("127.0.0.1", listener.port, TOKEN, 1, timeout_s=PATIENCE_S)
    thread.join()
    assert set(found[0]) == {1}
    assert not bomb.exists()
    listener.close()


def test_a_proof_of_one_connection_is_none_for_another():
    listener = Listener("127.0.0.1", TOKEN)
    thread, found = accept_in_thread(listener, timeout_s=0.5)
    hello = rank_channel._HELLO.pack(rank_channel._MAGIC, 1, 0, bytes(32))
    answers = []
    for _ in range(2):
        with dial(listener) as stranger:
            stranger.sendall(hello)
            answers.append(stranger.recv(64))
            stranger.sendall(answers[-1][32:])  # rank 0's own proof, sent back
            assert is_closed(stranger)
    assert answers[0] != answers[1]
    thread.join()
    assert "2 connections did not prove that they know the token of this run, the last from 127.0.0.1" in str(found[0])
    assert "ROLLOUTS_RANK_TOKEN the same on every machine?" in str(found[0])
    listener.close()


def test_a_rank_with_another_token_knows_it_at_once():
    listener = Listener("127.0.0.1", TOKEN)
    thread, _ = accept_in_thread(listener, timeout_s=0.3)
    with pytest.raises(WrongToken):
        connect_to_leader("127.0.0.1", listener.port, b"another secret", 1, timeout_s=PATIENCE_S)
    thread.join()
    listener.close()


def test_many_strangers_that_say_little_do_not_keep_the_ranks_out():
    """More than are let in at a time, which say nothing; and others that say a byte after the other, and come again when sent away."""
    listener = Listener("127.0.0.1", TOKEN)
    thread, found = accept_in_thread(listener, 3)
    silent = [dial(listener) for _ in range(rank_channel._MAX_STRANGERS + 20)]
    strangers = [dial(listener) for _ in range(50)]
    is_over = threading.Event()

    def dribble() -> None:
        while not is_over.is_set():
            for stranger in list(strangers):
                try:
                    stranger.sendall(b"r")
                except OSError:
                    strangers.remove(stranger)
                    strangers.append(dial(listener))

    attack = threading.Thread(target=dribble)
    attack.start()
    begin = time.monotonic()
    for rank in (1, 2):
        connect_to_leader("127.0.0.1", listener.port, TOKEN, rank, timeout_s=PATIENCE_S)
    thread.join()
    is_over.set()
    attack.join()
    assert time.monotonic() - begin < rank_channel._HELLO_S
    assert set(found[0]) == {1, 2}
    listener.close()
    for stranger in silent + strangers:
        stranger.close()


def test_strangers_do_not_make_the_wait_for_the_ranks_longer():
    listener = Listener("127.0.0.1", TOKEN)
    times = iter([0.0, 0.0, 1e6])  # the time is over when the first stranger has been let in
    stranger = dial(listener)
    with pytest.raises(BackendError, match="rank 1 of 2 did not join"):
        listener.accept(2, timeout_s=10 * PATIENCE_S, clock=lambda: next(times))
    assert is_closed(stranger)
    listener.close()


def test_a_stranger_that_says_nothing_is_sent_away_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(rank_channel, "_HELLO_S", 0.05)
    listener = Listener("127.0.0.1", TOKEN)
    thread, found = accept_in_thread(listener)
    assert is_closed(dial(listener))
    connect_to_leader("127.0.0.1", listener.port, TOKEN, 1, timeout_s=PATIENCE_S)
    thread.join()
    assert set(found[0]) == {1}
    listener.close()


# -- in between


class Relay:
    """Relays between a rank and rank 0, as an attacker that led the rank to an address of its own, and passes bytes through `change`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.towards_rank: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for _ in range(2):
            near, _ = self._door.accept()
            far = socket.create_connection(("127.0.0.1", self._port))
            self.towards_rank.append(near)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            target.sendall(data.replace(b"make 1", b"make 9"))


def test_who_sits_between_two_ranks_can_tell_neither_what_to_do():
    listener = Listener("127.0.0.1", TOKEN)
    relay = Relay(listener.port)
    thread, found = accept_in_thread(listener)
    near = connect_to_leader("127.0.0.1", relay.port, TOKEN, 1, timeout_s=PATIENCE_S)
    thread.join()
    leader = found[0][1]
    leader.commands.send(b"hold", PATIENCE_S)
    assert near.commands.receive(PATIENCE_S) == b"hold"
    leader.commands.send(b"make 1", PATIENCE_S)  # which is changed on the way
    with pytest.raises(ChannelClosed, match="has not sent as it is"):
        near.commands.receive(PATIENCE_S)
    relay.towards_rank[1].sendall(struct.pack("!Q", 4) + bytes(32) + b"evil")  # of its own
    with pytest.raises(ChannelClosed, match="has not sent as it is"):
        near.pulse.receive(PATIENCE_S)
    listener.close()


def test_a_message_is_taken_once_and_by_the_other_end_only():
    door = socket.create_server(("127.0.0.1", 0))

    def create(send_key: bytes, receive_key: bytes) -> tuple[Channel, socket.socket]:
        near = socket.create_connection(door.getsockname())
        return Channel(door.accept()[0], send_key=send_key, receive_key=receive_key), near

    sender, tap = create(b"a", b"b")
    sender.send(b"once", PATIENCE_S)
    message = tap.recv(1000)
    receiver, far = create(b"b", b"a")
    far.sendall(message + message)
    assert receiver.receive(PATIENCE_S) == b"once"
    with pytest.raises(ChannelClosed, match="has not sent as it is"):
        receiver.receive(PATIENCE_S)
    tap.sendall(message)  # back to its sender
    with pytest.raises(ChannelClosed, match="has not sent as it is"):
        sender.receive(PATIENCE_S)
    door.close()


# -- values


@dataclass(frozen=True)
class Settings:
    """Settings of a builder."""

    name: str
    sizes: tuple[int, ...] = (1, 2)


@dataclass
class Mutable:
    """No plain value."""

    x: int = 0


def test_plain_values_and_tensors_of_every_dtype_arrive_as_they_were():
    value = [None, True, 1, 2**70, 1.5, float("inf"), -0.0, "ü\x1b\ud800", b"\x00\xff", (1, (2,)), {"a": [1], 2: (), (3, "x"): {4}},
             frozenset({5}), slice(1, None, 2), Path("/a/b"), torch.bfloat16, torch.device("cpu")]  # fmt: skip
    found = load_value(dump_value(value))
    assert found == value
    assert [type(item) for item in found] == [type(item) for item in value]
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64):
        for shape in ((), (0,), (3, 0, 2), (2, 3)):
            x = (torch.rand(shape) * 9).to(dtype)
            y = load_value(dump_value({"x": x, "t": torch.nn.Parameter(torch.ones(2))}))["x"]
            assert y.dtype == dtype
            assert torch.equal(x, y), (dtype, shape)
    x = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(load_value(dump_value(x)), x)
    assert str(load_value(dump_value(float("nan")))) == "nan"


def test_functions_and_frozen_dataclasses_travel_by_name_where_names_are_allowed():
    value = (partial(sft_loss, 1, k=Settings("x")), Status.FAILED, OptimizerConfig(lr=0.5), Settings, jobs.create_tiny_backend)
    data = dump_value(value, names=True)
    found = load_value(data, names=True)
    assert (found[0].func, found[0].args, found[0].keywords) == (sft_loss, (1,), {"k": Settings("x")})
    assert found[1:] == value[1:]
    assert b"rollouts.algorithms.losses:sft_loss" in data
    for item in value:
        with pytest.raises(NotPlainError):
            dump_value([item])
        with pytest.raises(DamagedError, match="came where plain values and tensors are read"):
            load_value(dump_value([item], names=True))


@pytest.mark.parametrize("value", [lambda: 1, Mutable(), object(), threading.Lock(), "x".upper, {"model": torch.nn.Linear(1, 1)}])
def test_what_has_no_name_and_is_no_plain_value_is_refused(value):
    with pytest.raises(NotPlainError):
        dump_value(value, names=True)


def test_damaged_bytes_are_an_error_and_nothing_else(tmp_path: Path):
    good = dump_value({"x": torch.arange(5.0), "y": [1, (2,)]})
    bad = [good[:k] for k in range(0, len(good), 3)]
    bad += [struct.pack("!Q", len(head)) + head for head in (b'["tensor","float32",[1099511627776],0]', b'["tensor","load",[],4]',
            b'["eval","1"]',
            b"[" * 100_000, b'["tensor","float32",[2],-8]', b'["list",["bytes",1099511627776]]')]  # fmt: skip
    bad.append(pickle.dumps(jobs.Bomb(tmp_path / "bomb")))
    for data in bad:
        with pytest.raises(DamagedError):
            load_value(data)
    assert not (tmp_path / "bomb").exists()


def test_a_name_that_is_not_there_is_an_error_that_tells_it():
    data = dump_value(sft_loss, names=True).replace(b"sft_loss", b"sft_lost")
    with pytest.raises(DamagedError, match=r"rollouts\.algorithms\.losses:sft_lost is not found on this rank"):
        load_value(data, names=True)


# -- a run


def test_rank_0_unpickles_nothing_that_a_rank_answers_and_nothing_is_open_to_other_machines(tmp_path: Path):
    """Rank 1 is an attacker that knows the token: the bomb comes behind the proof."""
    body = """
import rank_processes as jobs
jobs.assert_loopback_only()
try:
    group.run("asking", jobs.answer_with_pickle, sys.argv[1], own=[(0,), (1,)])
except BackendError as error:
    print(error, flush=True)
assert group.run("telling", jobs.tell_rank, own=[(0,), (1,)]) == [(0,), (1,)]
"""
    children = start_ranks(script(body), 2, tmp_path / "bomb", folder=tmp_path / "out")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    assert "rank 1 failed in asking: its answer cannot be read" in children[0].out
    assert not (tmp_path / "bomb").exists()


def test_training_and_checkpoints_open_no_pickle_of_another_rank(tmp_path: Path):
    body = """
from pathlib import Path
group.run("forbidding", jobs.forbid_pickles)
backend = lead_backend(group, "policy", jobs.create_tiny_backend)
batch = jobs.make_batches()[0]
for _ in range(2):
    backend.forward_backward(batch, jobs.sft_loss).value
    backend.optim_step()
before = backend.forward(batch, jobs.select_log_probs).value
backend.save_checkpoint(Path(sys.argv[1])).value
backend.forward_backward(batch, jobs.sft_loss).value
backend.optim_step()
backend.load_checkpoint(Path(sys.argv[1])).value
assert backend.forward(batch, jobs.select_log_probs).value.equal(before)
backend.get_weights().value
"""
    (tmp_path / "checkpoint").mkdir()
    children = start_ranks(script(body), 2, tmp_path / "checkpoint", folder=tmp_path / "out")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()


SEVERAL = """
import os
os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", ROLLOUTS_RANK_ADDRESS=os.environ["RANK"] == "0" and "127.0.0.2" or "")
os.environ["ROLLOUTS_RANK_TOKEN"] = sys.argv[1 + int(os.environ["RANK"])] * 32
"""


def test_who_reads_and_writes_the_store_of_several_machines_cannot_join(tmp_path: Path):
    """The two ranks are on two machines as far as they know; rank 0 is reached at an address that it was told."""
    body = "print(group.run('telling', jobs.tell_rank, own=[(0,), (1,)]), flush=True)"
    late = "import time\nif os.environ['RANK'] == '1':\n    time.sleep(0.7)\n"
    children = start_ranks(SEVERAL + late + script(body), 2, "k", "k", folder=tmp_path)
    try:
        store = children[0].store
        store.wait(["rollouts/0/leader"])
        said = store.get("rollouts/0/leader").decode()
        host, port = said.split(" ")
        assert host == "127.0.0.2"
        for guess in (said, host, port, f"{said} 1 0"):
            with pytest.raises(WrongToken):
                connect_to_leader(host, int(port), guess.encode(), 1, timeout_s=PATIENCE_S)
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
        assert children[0].out == "[(0,), (1,)]\n"
    finally:
        for child in children:
            child.kill()


def test_machines_with_different_tokens_say_so(tmp_path: Path):
    children = start_ranks(SEVERAL + 'os.environ["TEST_TIMEOUT_S"] = "3"\n' + script("pass"), 2, "k", "other", folder=tmp_path)
    try:
        assert [child.wait() for child in children] == [1, 1]
        assert "knows another token: ROLLOUTS_RANK_TOKEN must be the same on every machine" in children[1].error
        assert "1 connections did not prove that they know the token" in children[0].error
    finally:
        for child in children:
            child.kill()


def place(**changes: str):
    return {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "1"} | changes


def test_one_machine_is_told_from_several():
    assert read_placement(place(LOCAL_WORLD_SIZE="2")).one_machine
    assert not read_placement(place(LOCAL_WORLD_SIZE="1")).one_machine
    assert not read_placement(place()).one_machine
    assert read_placement(place(MASTER_ADDR="localhost")).one_machine
    assert not read_placement(place(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE="1")).one_machine


def test_several_machines_without_a_token_are_refused_with_what_to_do():
    from rollouts.backends.ranks.group import join_ranks

    with pytest.raises(ConfigError, match=r"set ROLLOUTS_RANK_TOKEN to the same random text on every machine.*ROLLOUTS_RANK_TOKEN_FILE"):
        join_ranks(place(), timeout_s=1.0)


def test_a_token_comes_from_the_environment_or_a_file_that_nobody_else_reads(tmp_path: Path):
    assert read_token({}) is None
    assert read_token({"ROLLOUTS_RANK_TOKEN": "x" * 32}) == b"x" * 32
    path = tmp_path / "token"
    path.write_text("y" * 40 + "\n")
    path.chmod(0o600)
    assert read_token({"ROLLOUTS_RANK_TOKEN_FILE": str(path)}) == b"y" * 40
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token({"ROLLOUTS_RANK_TOKEN_FILE": str(path)})
    with pytest.raises(ConfigError, match="ROLLOUTS_RANK_TOKEN has 6 characters, expected 32 or more"):
        read_token({"ROLLOUTS_RANK_TOKEN": "secret"})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token({"ROLLOUTS_RANK_TOKEN_FILE": str(tmp_path / "none")})


def test_on_one_machine_the_token_lies_where_this_user_alone_reads_it(tmp_path: Path):
    from rollouts.backends.ranks.meeting import meet

    (tmp_path / f"rollouts-{os.getuid()}").mkdir(mode=0o700)
    directory = next(tmp_path.iterdir())
    environment = place(LOCAL_WORLD_SIZE="2", XDG_RUNTIME_DIR=str(tmp_path))
    meetings: list = []
    leader = threading.Thread(
        target=lambda: meetings.append(meet(environment, read_placement(environment | {"RANK": "0"}), timeout_s=PATIENCE_S))
    )
    (directory / "left.json").write_text("of another run")
    leader.start()
    while not (files := [path for path in directory.glob("*.json") if path.name != "left.json"]):
        assert leader.is_alive()
        time.sleep(0.005)
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    found = meet(environment, read_placement(environment), timeout_s=PATIENCE_S)
    leader.join()
    found.store.set("key", "value")
    assert meetings[0].store.get("key") == b"value"
    assert [path.name for path in directory.iterdir()] == ["left.json"]


def test_a_file_of_a_run_that_was_killed_leads_nobody_astray(tmp_path: Path):
    from rollouts.backends.ranks.meeting import meet

    environment = place(LOCAL_WORLD_SIZE="2", XDG_RUNTIME_DIR=str(tmp_path))
    other = Listener("127.0.0.1", b"of a program that has the port now")
    thread, _ = accept_in_thread(other, timeout_s=0.6)
    with pytest.raises(BackendError, match="did not find rank 0 on this machine"):
        meet(environment, read_placement(environment), timeout_s=0.05)
    meetings: list = []  # kept: rank 0 serves the store
    as_leader = read_placement(environment | {"RANK": "0"})
    leader = threading.Thread(target=lambda: meetings.append(meet(environment, as_leader, timeout_s=PATIENCE_S)))
    directory = tmp_path / f"rollouts-{os.getuid()}"
    leader.start()
    while not (files := list(directory.glob("*.json"))):
        time.sleep(0.005)
    good = files[0].read_text()
    files[0].write_text(f'{{"port": {other.port}, "store": 1, "token": "{"t" * 64}"}}')
    threading.Timer(0.2, files[0].write_text, [good]).start()
    meet(environment, read_placement(environment), timeout_s=PATIENCE_S)
    leader.join()
    thread.join()
    other.close()


def test_a_place_to_meet_that_others_may_enter_is_refused(tmp_path: Path, monkeypatch):
    from rollouts.backends.ranks.meeting import meet

    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"rollouts-{os.getuid()}").mkdir()
    (tmp_path / f"rollouts-{os.getuid()}").chmod(0o755)
    environment = place(LOCAL_WORLD_SIZE="2")
    with pytest.raises(ConfigError, match=r"not a directory of this user alone \(mode 700\)"):
        meet(environment, read_placement(environment), timeout_s=1.0)


# -- addresses


def no_peer() -> str:
    raise AssertionError("nobody was to be asked")


def test_rank_0_listens_where_the_other_machines_reach_it(monkeypatch):
    assert find_address({"ROLLOUTS_RANK_ADDRESS": "127.0.0.2"}, "node-a", no_peer) == "127.0.0.2"
    with pytest.raises(ConfigError, match="expected an IP address, such as"):
        find_address({"ROLLOUTS_RANK_ADDRESS": "node-a"}, "node-a", no_peer)
    # a name that means loopback here, as a machine's own name on Debian: the way to the other machine tells
    assert find_address({}, "127.0.1.1", lambda: "127.0.0.1") == "127.0.0.1"  # and not the name's
    with pytest.raises(ConfigError, match=r"'127\.0\.1\.1' \(MASTER_ADDR\) is no address.*ROLLOUTS_RANK_ADDRESS"):
        find_address({}, "127.0.1.1", lambda: "no address")
    # an address that is not loopback, and another machine's
    assert find_address({}, "203.0.113.7", lambda: "127.0.0.1") == "127.0.0.1"


@needs.LINUX  # whose name of the loopback interface it is
@pytest.mark.parametrize(
    ("own", "address", "expected"),
    [
        ("127.0.1.1", "127.0.0.1", None),
        ("192.0.2.5", "127.0.0.1", "lo"),
        ("192.0.2.5", "192.0.2.5", None),
        ("127.0.1.1", "192.0.2.5", None),
    ],
)
def test_gloo_listens_where_the_ranks_have_met(monkeypatch, own, address, expected):
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    environment: dict[str, str] = {}
    choose_interface(environment, address)
    assert environment.get("GLOO_SOCKET_IFNAME") == expected
    mine = {"GLOO_SOCKET_IFNAME": "eth7"}
    choose_interface(mine, address)
    assert mine == {"GLOO_SOCKET_IFNAME": "eth7"}
