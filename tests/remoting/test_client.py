"""The remoting client: one connection per address, reopened after it was lost, and a timeout for every wait."""

import pytest
import trio
import trio.testing

from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClientOptions, open_remoting_client
from tests.remoting.wire import MemoryListener, Peer, Recorder, open_wire, request


class Addresses:
    """Connects to memory listeners by name; an unknown name refuses, "nowhere" never answers."""

    def __init__(self, **listeners: MemoryListener) -> None:
        self.listeners = listeners
        self.made: list[str] = []

    async def __call__(self, address: str) -> trio.abc.Stream:
        self.made.append(address)
        if address == "nowhere":
            await trio.sleep_forever()
        if address not in self.listeners:
            raise ConnectionRefusedError(111, "Connection refused")
        await trio.lowlevel.checkpoint()
        return self.listeners[address].connect()


async def test_requests_to_one_address_share_one_connection() -> None:
    async with open_wire(Recorder()) as wire:
        connect = Addresses(a=wire.listener)
        async with open_remoting_client(connect=connect) as client:
            got: list[bytes] = []

            async def ask(n: int) -> None:
                got.append(bytes((await client.invoke("a", request(5, b"%d" % n), 3)).body))

            async with trio.open_nursery() as nursery:
                for n in range(10):
                    nursery.start_soon(ask, n)
            assert sorted(got) == [b"%d" % n for n in range(10)]
            assert connect.made == ["a"]
            assert client.statistics().connections == 1


async def test_a_copy_of_the_request_is_signed() -> None:
    """A request may go to several name servers."""
    recorder = Recorder()

    def sign(command: RemotingCommand) -> None:
        command.ext_fields["Signature"] = "s"

    async with (
        open_wire(recorder) as wire,
        open_remoting_client(connect=Addresses(a=wire.listener), sign=sign) as client,
    ):
        command = request(5)
        before = dict(command.ext_fields)
        await client.invoke("a", command, 3)
    assert command.ext_fields == before
    [[received]] = recorder.chunks
    assert received.ext_fields["Signature"] == "s"


async def test_the_time_may_be_over_before_the_request_is_sent(autojump_clock: trio.testing.MockClock) -> None:
    recorder = Recorder()
    async with (
        open_wire(recorder) as wire,
        open_remoting_client(connect=Addresses(a=wire.listener), sign=lambda command: autojump_clock.jump(4)) as client,
    ):
        with pytest.raises(trio.TooSlowError):
            await client.invoke("a", request(5), 3)
        assert (await client.invoke("a", request(5), 5)).code == 0
        assert client.statistics().opened == 1


async def test_a_lost_connection_fails_pending_requests_and_is_reopened() -> None:
    listener = MemoryListener()
    connect = Addresses(a=listener)
    async with open_remoting_client(connect=connect) as client:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await client.invoke("a", request(0), 3)

            nursery.start_soon(ask)
            peer = Peer(await listener.accept())
            await peer.receive()
            await peer.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert client.statistics().connections == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.invoke, "a", request(0), 3)
            peer = Peer(await listener.accept())
            asked = await peer.expect()
            await peer.send(asked.reply(0))
        assert connect.made == ["a", "a"]
        assert client.statistics().closed == {"end of stream": 1}


async def test_an_address_that_refuses_fails_at_once_and_affects_no_other() -> None:
    async with open_wire(Recorder()) as wire, open_remoting_client(connect=Addresses(a=wire.listener)) as client:
        with pytest.raises(OSError, match="Connection refused"):
            await client.invoke("b", request(0), 3)
        assert (await client.invoke("a", request(0, b"x"), 3)).body == b"x"
        assert client.statistics().refused == 1


async def test_connecting_has_a_timeout_of_its_own_and_that_of_the_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_remoting_client(connect=Addresses()) as client:
        with pytest.raises(trio.TooSlowError):
            await client.invoke("nowhere", request(0), 2)
        assert trio.current_time() == pytest.approx(2)
        with pytest.raises(TimeoutError, match="not reached within 3 s"):
            await client.invoke("nowhere", request(0), 10)  # shares the attempt that began at 0
        assert trio.current_time() == pytest.approx(3)
        with pytest.raises(TimeoutError):
            await client.invoke("nowhere", request(0), 10)
        assert trio.current_time() == pytest.approx(6)


async def test_a_silent_peer_is_closed_and_connected_again(autojump_clock: trio.testing.MockClock) -> None:
    listener = MemoryListener()
    connect = Addresses(a=listener)
    async with open_remoting_client(connect=connect) as client:
        for _ in range(2):
            with pytest.raises(trio.TooSlowError):
                await client.invoke("a", request(0), 4)
        assert trio.current_time() == pytest.approx(8)
        assert connect.made == ["a", "a"]
        await trio.testing.wait_all_tasks_blocked()
        assert client.statistics().closed == {"no answer": 2}


async def test_an_idle_connection_is_closed_after_120_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async with open_wire(Recorder()) as wire, open_remoting_client(connect=Addresses(a=wire.listener)) as client:
        await client.invoke("a", request(0), 3)
        await trio.sleep(119.9)
        assert client.statistics().connections == 1
        await trio.sleep(0.2)
        assert client.statistics().connections == 0


async def test_requests_of_the_server_are_refused() -> None:
    listener = MemoryListener()
    async with open_remoting_client(connect=Addresses(a=listener)) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.connection, "a")
        peer = Peer(await listener.accept())
        answer = await peer.ask(RemotingCommand(307, 12))
        assert (answer.opaque, answer.code, answer.remark) == (12, 3, " request type 307 not supported")


async def test_closing_fails_requests_in_flight() -> None:
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:

        async def ask(address: str) -> None:
            with pytest.raises((OSError, trio.BrokenResourceError)):
                await client.invoke(address, request(0), 1000)

        async with open_remoting_client(connect=Addresses(a=listener)) as client:
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "nowhere")
            await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(OSError, match="closing"):
        await client.invoke("a", request(0), 1)


async def test_the_number_of_addresses_is_limited() -> None:
    async with open_wire(Recorder()) as wire:
        connect = Addresses(a=wire.listener, b=wire.listener, c=wire.listener)
        async with open_remoting_client(RemotingClientOptions(connections_max=2), connect=connect) as client:
            await client.invoke("a", request(0), 3)
            await client.invoke("b", request(0), 3)
            with pytest.raises(OSError, match="no room for c"):
                await client.invoke("c", request(0), 3)
