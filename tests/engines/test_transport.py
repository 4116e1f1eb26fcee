from __future__ import annotations

import gzip
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import needs
import pytest
import trio
import trio.testing

from benchmarks.reliability.loopback import Exchange, has_arrived, serve, settle
from rollouts.engines.http import connection
from rollouts.engines.http.connection import KeptConnectionLost, ServerHungUp, open_connection
from rollouts.engines.http.transport import PooledTransport

BIG = b"0123456789abcdef" * (1 << 16)  # 1 MB, more than the buffers of two sockets take together
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


def create_client(transport: PooledTransport, timeout: httpx.Timeout | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)


async def answer(exchange: Exchange) -> None:
    await exchange.answer(exchange.body or exchange.target.encode())


# answers that come whole, and connections that are kept


async def test_requests_one_after_another_share_a_connection():
    transport = PooledTransport()
    async with serve(answer) as server, create_client(transport) as client:
        for i in range(5):
            assert (await client.post(server.url, content=f"{i}".encode())).text == f"{i}"
            assert (transport.num_idle, transport.num_in_flight) == (1, 0)
        assert server.num_connections == 1


async def test_requests_at_the_same_time_have_a_connection_each_and_keep_them():
    async def wait_for_all(exchange: Exchange) -> None:
        await settle(lambda: len(server.exchanges) % 20 == 0)
        await exchange.answer()

    transport = PooledTransport(idle_expiry_s=1000.0)
    async with serve(wait_for_all) as server, create_client(transport) as client:
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(client.get, server.url)
        assert server.num_connections == transport.num_idle == 20
        assert len(server.exchanges) == 60


ANSWERS = {  # what the server sends: what the client reads, and whether the connection is used again
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello": (200, b"hello", True),
    b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n": (200, b"", True),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n": (200, b"hello", True),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nTrailer: 1\r\n\r\n": (200, b"hello", True),
    b"HTTP/1.1 204 No Content\r\n\r\n": (204, b"", True),
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n": (304, b"", True),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\nHTTP/1.1 500\r\nContent-Length: 2\r\n\r\nno": (500, b"no", True),
    b"HTTP/1.1 200 OK\r\n\r\nhello": (200, b"hello", False),  # until the server closes
    b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello": (200, b"hello", False),
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello": (200, b"hello", False),
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more": (200, b"hello", False),
}


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize("data", ANSWERS, ids=range(len(ANSWERS)))
async def test_every_way_to_end_a_body_in_pieces_of_any_size(data: bytes, piece: int):
    status, body, is_kept = ANSWERS[data]

    async def in_pieces(exchange: Exchange) -> None:
        for i in range(0, len(data), piece):
            await exchange.send(data[i : i + piece])
            await trio.lowlevel.checkpoint()
        if not is_kept:
            exchange.close()

    transport = PooledTransport()
    async with serve(in_pieces) as server, create_client(transport) as client:
        for _ in range(2):
            response = await client.post(server.url, content=b"question")
            assert (response.status_code, response.content) == (status, body)
            await settle(lambda: is_kept or server.num_open == 0)
        assert transport.num_in_flight == 0
        assert server.num_connections == (1 if is_kept else 2)


async def test_head_requests_have_no_body():
    async def head(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")

    transport = PooledTransport()
    async with serve(head) as server, create_client(transport) as client:
        assert (await client.head(server.url)).content == b""
        assert (await client.head(server.url)).headers["content-length"] == "500"
        assert server.num_connections == 1


async def test_parts_of_a_body_come_while_the_server_still_works_on_it():
    go_on = trio.Event()

    async def in_two_parts(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        await exchange.send(b"3\r\ntwo\r\n0\r\n\r\n")

    transport = PooledTransport()
    async with serve(in_two_parts) as server, create_client(transport) as client:
        async with client.stream("GET", server.url) as response:
            parts = response.aiter_bytes()
            assert await anext(parts) == b"one"
            assert transport.num_in_flight == 1
            go_on.set()
            assert [part async for part in parts] == [b"two"]
        assert (transport.num_in_flight, transport.num_idle) == (0, 1)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_huge_questions_and_answers(is_chunked: bool):
    async def echo(exchange: Exchange) -> None:
        assert exchange.body == 16 * BIG
        if not is_chunked:
            await exchange.answer(exchange.body)
            return
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(16):
            await exchange.send(b"%x\r\n%b\r\n" % (len(BIG), BIG))
        await exchange.send(b"0\r\n\r\n")

    async def in_parts() -> AsyncIterator[bytes]:
        for _ in range(16):
            yield BIG

    transport = PooledTransport()
    async with serve(echo) as server, create_client(transport) as client:
        for _ in range(2):
            response = await client.post(server.url, content=in_parts() if is_chunked else 16 * BIG)
            assert response.content == 16 * BIG
        assert server.num_connections == 1


async def test_it_is_a_transport_like_any_other_to_httpx():
    async def shop(exchange: Exchange) -> None:
        if exchange.target == "/old":
            await exchange.answer(b"", 302, ("Location: /new", "Set-Cookie: a=b"))
        else:
            body = gzip.compress(exchange.headers["cookie"].encode())
            await exchange.answer(body, headers=("Content-Encoding: gzip", "X: 1", "X: 2"))

    async with serve(shop) as server, create_client(PooledTransport()) as client:
        response = await client.get(server.url + "/old", follow_redirects=True)
        assert (response.text, response.url.path, response.http_version, response.reason_phrase) == ("a=b", "/new", "HTTP/1.1", "X")
        assert response.headers.get_list("x") == ["1", "2"]


# connections that the server ends


async def test_a_connection_that_the_server_closed_while_it_lay_idle_is_not_used():
    async def once(exchange: Exchange) -> None:
        await exchange.answer()
        exchange.close()

    transport = PooledTransport()
    async with serve(once) as server, create_client(transport) as client:
        for _ in range(3):
            assert (await client.post(server.url)).status_code == 200
            await settle(lambda: server.num_open == 0)
        assert server.num_connections == len(server.exchanges) == 3


async def test_what_a_server_says_unasked_is_not_taken_for_the_next_answer():
    num_unasked = 0

    async def time_out(exchange: Exchange) -> None:
        nonlocal num_unasked
        await exchange.answer(b"asked for")
        await settle(lambda: transport.num_idle == 1)
        await exchange.answer(b"unasked", status=408)
        await settle(lambda: has_arrived(exchange.sock))
        num_unasked += 1

    transport = PooledTransport()
    async with serve(time_out) as server, create_client(transport) as client:
        for i in range(3):
            assert (await client.post(server.url)).text == "asked for"
            await settle(lambda i=i: num_unasked == i + 1)
        assert server.num_connections == 3


async def test_what_follows_the_end_of_an_answer_is_not_taken_for_the_next_one():
    async def say_more(exchange: Exchange) -> None:
        second = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nunasked"
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nasked for" + second)

    async with serve(say_more) as server, create_client(PooledTransport()) as client:
        for _ in range(3):
            assert (await client.post(server.url)).text == "asked for"
        assert server.num_connections == 3


async def test_a_connection_that_lay_idle_for_long_is_closed():
    now = 100.0
    transport = PooledTransport(idle_expiry_s=4.0, clock=lambda: now)
    barrier = trio.Event()

    async def wait(exchange: Exchange) -> None:
        await barrier.wait()
        await exchange.answer()

    async with serve(wait) as server, create_client(transport) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(client.get, server.url)
            await settle(lambda: len(server.exchanges) == 3)
            barrier.set()
        now += 3.0
        await client.get(server.url)
        assert (server.num_connections, transport.num_idle) == (3, 3)
        now += 2.0  # two have been idle for 5 s, one for 2 s
        await client.get(server.url)
        await settle(lambda: server.num_open == 1)
        assert (server.num_connections, transport.num_idle) == (3, 1)
        now += 4.1
        await client.get(server.url)
        assert (server.num_connections, transport.num_idle) == (4, 1)


@pytest.mark.parametrize(
    ("method", "extensions", "is_repeated"),
    [("POST", {}, False), ("GET", {}, True), ("POST", {"repeatable": True}, True), ("GET", {"repeatable": False}, False)],
)
async def test_a_request_that_was_read_is_sent_again_only_where_twice_is_the_same_as_once(
    method: str, extensions: dict, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "ROUND_TRIP_S", 0.05)  # no reset comes, however long one waits for it

    async def die_after_reading(exchange: Exchange) -> None:
        if len(server.exchanges) == 2:
            exchange.close()
        else:
            await exchange.answer()

    transport = PooledTransport()
    async with serve(die_after_reading) as server, create_client(transport) as client:
        await client.request(method, server.url, extensions=extensions)
        if is_repeated:
            await client.request(method, server.url, extensions=extensions)
        else:
            with pytest.raises(KeptConnectionLost, match="without an answer") as caught:
                await client.request(method, server.url, extensions=extensions)
            assert not caught.value.is_unread
        assert len(server.exchanges) == (3 if is_repeated else 2)
        assert (server.num_connections, transport.num_in_flight) == (2 if is_repeated else 1, 0)


@pytest.mark.parametrize("held_up_s", [0.0, 0.6])
async def test_a_request_that_the_server_did_not_read_is_sent_again(held_up_s: float):
    async def close_on_the_next(exchange: Exchange) -> None:
        await exchange.answer()
        if exchange.connection == 0:
            await trio.lowlevel.wait_readable(exchange.sock)
            await trio.testing.wait_all_tasks_blocked()  # the client waits for the answer
            exchange.close()
            time.sleep(held_up_s)  # the whole process, as by a step of training: the client looks for its answer late

    transport = PooledTransport()
    async with serve(close_on_the_next) as server, create_client(transport) as client:
        await client.post(server.url, content=b"1")
        assert (await client.post(server.url, content=b"2")).status_code == 200
        assert [exchange.body for exchange in server.exchanges] == [b"1", b"2"]
        assert (server.num_connections, transport.num_idle) == (2, 1)


async def test_a_reset_after_the_close_tells_that_a_request_came_too_late():
    async def once(exchange: Exchange) -> None:
        await exchange.answer()
        exchange.close()

    async with serve(once) as server:
        request = httpx.Request("POST", server.url)
        kept = await open_connection(("http", "127.0.0.1", server.port), request, 30.0, None)
        await kept.begin(request, b"")
        assert await kept.read_chunk(request, None) == b"{}"
        assert await kept.read_chunk(request, None) == b""
        await settle(kept.has_input)  # the close has come; sending regardless is what happens when it comes a moment later
        with pytest.raises(KeptConnectionLost) as caught:
            await kept.begin(request, b"")
        assert caught.value.is_unread
        kept.close_now()


async def test_a_request_on_a_fresh_connection_is_never_sent_again():
    async def die(exchange: Exchange) -> None:
        exchange.close()

    transport = PooledTransport()
    async with serve(die) as server, create_client(transport) as client:
        for method in ("POST", "GET"):
            with pytest.raises(ServerHungUp, match="without an answer"):
                await client.request(method, server.url)
        assert len(server.exchanges) == 2
        assert transport.num_in_flight == 0


async def test_fresh_connections_on_request():
    transport = PooledTransport()
    async with serve(answer) as server, create_client(transport) as client:
        await client.get(server.url)
        await client.get(server.url, extensions={"fresh_connection": True})
        assert [exchange.connection for exchange in server.exchanges] == [0, 1]


DROPS = [
    (b"HTTP/1.1 200", "close", ServerHungUp, "in the middle of its answer"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n", "close", ServerHungUp, "in the middle of its answer"),
    (b"HTTP/1.1 100 Continue\r\n\r\n", "close", ServerHungUp, "in the middle of its answer"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "close", ServerHungUp, "in the middle of its answer"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf", "close", ServerHungUp, "in the middle of its answer"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", "close", ServerHungUp, "in the middle of its answer"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n", "reset", httpx.ReadError, "broke while the answer was read"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "reset", httpx.ReadError, "broke while the answer was read"),
    (b"HTTP/1.1 200 OK\r\n\r\nhalf", "reset", httpx.ReadError, "broke while the answer was read"),
]


@pytest.mark.parametrize(("data", "ending", "error", "message"), DROPS, ids=range(len(DROPS)))
@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_server_that_drops_the_connection_in_the_middle(data: bytes, ending: str, error: type, message: str, is_kept: bool):
    async def drop(exchange: Exchange) -> None:
        if exchange.target == "/good":
            await exchange.answer()
            return
        await exchange.send_to_reader(data)  # a reset may make the other side forget what it has not read
        exchange.reset() if ending == "reset" else exchange.close()

    transport = PooledTransport(max_connections=1)
    async with serve(drop) as server, create_client(transport) as client:
        if is_kept:
            await client.get(server.url + "/good")
        with pytest.raises(error, match=message):
            await client.get(server.url)
        assert (transport.num_in_flight, transport.num_idle) == (0, 0)
        assert (await client.get(server.url + "/good")).status_code == 200
        assert len(server.exchanges) == 2 + is_kept


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + BIG,
    ],
    ids=range(8),
)
async def test_what_is_no_http_is_an_error_of_the_protocol(data: bytes):
    async def babble(exchange: Exchange) -> None:
        await exchange.send(data)
        await exchange.wait_hung_up()

    transport = PooledTransport()
    async with serve(babble) as server, create_client(transport) as client:
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await client.get(server.url)
        assert not isinstance(caught.value, ServerHungUp)
        await settle(lambda: server.num_open == 0)
        assert (transport.num_in_flight, transport.num_idle) == (0, 0)


async def test_an_answer_to_a_request_that_was_not_read_to_its_end_is_heard():
    async def refuse(stream: trio.SocketStream) -> None:
        await stream.receive_some(1000)
        await stream.send_all(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig")
        await settle(lambda: has_arrived(stream.socket))
        await stream.aclose()

    transport = PooledTransport()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, refuse, 0)
        async with create_client(transport) as client:
            response = await client.post(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", content=32 * BIG)
            assert (response.status_code, response.text, transport.num_idle) == (413, "big", 0)
        nursery.cancel_scope.cancel()


async def test_a_server_that_closes_before_it_has_read_the_request():
    async def refuse(stream: trio.SocketStream) -> None:
        await stream.receive_some(1000)
        await stream.aclose()

    transport = PooledTransport()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, refuse, 0)
        async with create_client(transport) as client:
            with pytest.raises(httpx.WriteError, match="before it had read the request"):
                await client.post(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", content=32 * BIG)
            assert transport.num_in_flight == 0
        nursery.cancel_scope.cancel()


# names, addresses and certificates


class Names(trio.abc.HostnameResolver):
    """Knows the addresses of some names, in an order, and no others."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses

    async def getaddrinfo(self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        found = self.addresses.get(host.decode())
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        six = [":" in address for address in found]
        targets = [(address, port, 0, 0) if is_six else (address, port) for address, is_six in zip(found, six, strict=True)]
        families = [socket.AF_INET6 if is_six else socket.AF_INET for is_six in six]
        return [(family, socket.SOCK_STREAM, 0, "", target) for family, target in zip(families, targets, strict=True)]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


@needs.ipv6()
async def test_addresses_of_ipv6():
    async with serve(answer, host="::1") as server, create_client(PooledTransport()) as client:
        assert (await client.get(server.url + "/six")).text == "/six"
        assert server.exchanges[0].headers["host"] == f"[::1]:{server.port}"


async def test_names_and_those_with_an_address_at_which_nobody_listens():
    """The name is localhost, where the server listens only on IPv4, and a name that DNS would not allow but a container may have."""
    trio.socket.set_custom_hostname_resolver(Names(vllm_server=["127.0.0.1"], both=["127.0.0.2", "::1", "127.0.0.1"]))
    async with serve(answer) as server, create_client(PooledTransport()) as client:
        for name in ("vllm_server", "both"):
            assert (await client.get(f"http://{name}:{server.port}/name")).text == "/name"
            assert server.exchanges[-1].headers["host"] == f"{name}:{server.port}"


async def test_why_a_connection_failed_is_said():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        transport = PooledTransport()
        trio.socket.set_custom_hostname_resolver(Names())
        async with create_client(transport) as client:
            with pytest.raises(httpx.ConnectError, match=f"127.0.0.1:{port}.*refused"):
                await client.get(f"http://127.0.0.1:{port}")
            with pytest.raises(httpx.ConnectError, match=r"no-such-host\.invalid:80"):
                await client.get("http://no-such-host.invalid")
            with pytest.raises(httpx.ConnectError, match=r"two\.\.dots:80.*no name of a host"):
                await client.get("http://two..dots")
        assert transport.num_in_flight == 0


async def test_open_files_running_out_is_an_error_of_the_request_and_passes():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    transport = PooledTransport()
    async with serve(answer) as server, create_client(transport) as client:
        await client.get(server.url)
        with open("/dev/null") as probe:
            limit = probe.fileno()  # the next one that would be given
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            with pytest.raises(httpx.ConnectError, match=r"open files.*ulimit -n"):
                await client.get(server.url, extensions={"fresh_connection": True})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert transport.num_in_flight == 0
        assert (await client.get(server.url, extensions={"fresh_connection": True})).status_code == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a key and a certificate for localhost that it signs itself."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    path = folder / "both.pem"
    path.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return str(path)


@needs.OPENSSL
async def test_https_is_checked_and_kept_alive(certificate: str):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with serve(answer, context=context) as server:
        url = f"https://localhost:{server.port}/secret"
        trusting = PooledTransport(verify=ssl.create_default_context(cafile=certificate))
        async with create_client(trusting) as client:
            for _ in range(3):
                assert (await client.get(url)).text == "/secret"
            assert (trusting.num_idle, server.num_connections) == (1, 1)
        async with create_client(PooledTransport()) as client:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await client.get(url)
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(url.replace("https", "http"))
        async with create_client(PooledTransport(verify=False)) as client:
            assert (await client.get(url)).text == "/secret"
    async with serve(answer) as server, create_client(PooledTransport()) as client:
        with pytest.raises(httpx.ConnectError, match="no TLS with"):
            await client.get(f"https://localhost:{server.port}")


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serve(answer) as server, httpx.AsyncClient(transport=PooledTransport()) as client:
        assert (await client.get(server.url + "/direct")).text == "/direct"
