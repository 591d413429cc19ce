"""What a node tells others about where it is, and what a slave makes of what it is told."""

import socket
import threading
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import msgspec
import pytest
import trio

from ha.broker.registration import MasterAddresses
from ha.config import Config, OptionalPort, load_config
from ha.errors import AddressInUse, ConfigError
from ha.node.addresses import advertise, take_ports
from ha.node.master_address import ask_min_offset, master_broker_address
from ha.node.platform import Platform, Port
from ha.node.ports import join, own_address, resolve
from ha.protocol import java_json
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import BoundPort, RemotingClient
from tests.remoting.lookups import watch_lookups


@pytest.mark.parametrize(
    ("told", "configured", "expected"),
    [
        (None, "10.0.0.1:10912", None),
        (("10.0.0.1:10911", "10.0.1.1:10912"), None, "10.0.0.1:10911"),
        (("127.0.0.1:10911", "127.0.0.1:10912"), None, "127.0.0.1:10911"),
        (("127.0.0.1:10911", "master:10912"), None, "master:10911"),
        (("127.0.0.1:10911", "127.0.0.1:10912"), "10.0.1.1:10912", "10.0.1.1:10911"),
        (("localhost:20911", "10.0.1.1:10912"), None, "10.0.1.1:20911"),
    ],
)
def test_where_a_master_answers_requests(
    told: tuple[str, str] | None, configured: str | None, expected: str | None
) -> None:
    assert master_broker_address(MasterAddresses(*told) if told else None, configured) == expected


class Answering(RemotingClient):
    """Answers request 28 as told."""

    def __init__(self, answer: RemotingCommand | OSError) -> None:
        super().__init__()
        self._answer = answer
        self.asked: list[tuple[str, int]] = []

    async def invoke(self, address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        await trio.lowlevel.checkpoint()
        self.asked.append((address, command.code))
        if isinstance(self._answer, OSError):
            raise self._answer
        return self._answer


def runtime_info(table: Any, code: int = ResponseCode.SUCCESS) -> RemotingCommand:
    return RemotingCommand(code, body=java_json.dumps({"table": table}))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (runtime_info({"commitLogMinOffset": "1048576", "bootTimestamp": "1"}), 1_048_576),
        (runtime_info({"commitLogMinOffset": "0"}), 0),
        (runtime_info({"commitLogMinOffset": "-1"}), None),
        (runtime_info({"commitLogMinOffset": "x"}), None),
        (runtime_info({}), None),
        (runtime_info([]), None),
        (runtime_info({"commitLogMinOffset": "5"}, ResponseCode.REQUEST_CODE_NOT_SUPPORTED), None),
        (RemotingCommand(ResponseCode.SUCCESS, body=b"no json"), None),
        (OSError("refused"), None),
    ],
)
async def test_asking_a_rocketmq_master_for_its_first_offset(
    answer: RemotingCommand | OSError, expected: int | None
) -> None:
    client = Answering(answer)
    assert await ask_min_offset(client, "10.0.0.1:10911") == expected
    assert client.asked == [("10.0.0.1:10911", RequestCode.GET_BROKER_RUNTIME_INFO)]
    assert await ask_min_offset(client, None) is None


@pytest.mark.parametrize("host", ["10.0.0..1", "x" * 64])
async def test_a_host_that_can_be_no_name_is_an_error_of_its_key(host: str) -> None:
    config = load_config(Config, settings=["listenPort=0", f"brokerIP1={host}", "bindAddress=127.0.0.1"]).config
    with ExitStack() as bound, pytest.raises(ConfigError, match=f"brokerIP1: {host}: it is no host name"):
        await advertise(config, Platform(), await take_ports(config, Platform(), bound))


async def test_a_node_starts_without_the_default_grpc_port_but_not_without_one_that_is_set() -> None:
    def bind(key: str, host: str, port: int) -> AbstractContextManager[Port]:
        if port == 8081:
            raise AddressInUse(key, host, port, "Address already in use")
        return BoundPort(key, host, 0)

    with ExitStack() as bound:
        assert (await take_ports(load_config(Config).config, Platform(bind=bind), bound)).grpc is None
        chosen = load_config(Config, settings=["grpcListenPort=8081"]).config
        with pytest.raises(AddressInUse, match="grpcListenPort: can't listen on"):
            await take_ports(chosen, Platform(bind=bind), bound)


async def test_the_fast_port_does_not_take_that_of_the_name_server() -> None:
    taken: set[int] = set()

    def bind(key: str, host: str, port: int) -> AbstractContextManager[Port]:
        if port in taken:
            raise AddressInUse(key, host, port, "Address already in use")
        taken.add(port)
        return BoundPort(key, host, 0)

    with ExitStack() as bound:
        ports = await take_ports(load_config(Config, settings=["listenPort=9878"]).config, Platform(bind=bind), bound)
        assert (ports.fast is None, ports.name_server is None) == (True, False)


async def test_the_default_grpc_port_is_bound_if_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
    settings = ["listenPort=0", "haListenPort=0", "adminListenPort=0"]
    config = msgspec.structs.replace(
        load_config(Config, settings=settings).config, grpc_listen_port=OptionalPort(number)
    )
    with ExitStack() as bound:
        port = (await take_ports(config, Platform(bind=BoundPort), bound)).grpc
        assert port is not None
        assert port.port == number


async def test_a_node_that_listens_on_ipv6_reports_an_ipv6_address() -> None:
    """It reported its IPv4 address, on which it did not listen."""
    try:
        BoundPort("listenPort", "::", 0).release()
    except AddressInUse as error:
        pytest.skip(f"no IPv6 here: {error.reason}")
    settings = [f"{key}=0" for key in ("listenPort", "haListenPort", "adminListenPort", "grpcListenPort")]
    config = load_config(Config, settings=[*settings, "bindAddress=::"]).config
    with ExitStack() as bound:
        ports = await take_ports(config, Platform(), bound)
        told = await advertise(config, Platform(), ports)
        assert socket.inet_pton(socket.AF_INET6, told.client_host)
        [listener] = ports.remoting.listen()
        async with listener, await trio.open_tcp_stream(told.client_host, told.client_port):
            pass


async def test_host_names_of_ports_are_looked_up_in_a_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = watch_lookups(monkeypatch)
    settings = [f"{key}=0" for key in ("listenPort", "haListenPort", "adminListenPort", "grpcListenPort")]
    for key in ("bindAddress", "adminBindAddress"):
        config = load_config(Config, settings=[*settings, f"{key}={key}.invalid"]).config
        with ExitStack() as bound:
            await take_ports(config, Platform(), bound)
        assert threads[f"{key}.invalid"] != threading.get_ident()


def test_addresses_as_text() -> None:
    assert join("10.0.0.1", 1) == "10.0.0.1:1"
    assert join("::1", 1) == "[::1]:1"
    assert resolve("127.0.0.1") == "127.0.0.1"
    assert resolve("localhost") == "127.0.0.1"
    assert socket.inet_aton(own_address("0.0.0.0"))
