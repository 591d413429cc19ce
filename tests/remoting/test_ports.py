"""Ports that are bound before they are listened on: ports in use, and host names with addresses of other machines."""

import socket

import pytest
import trio

from ha.errors import AddressInUse
from ha.remoting import BoundPort


async def test_a_bound_port_refuses_until_it_is_listened_on() -> None:
    with BoundPort("listenPort", "127.0.0.1", 0) as port:
        with pytest.raises(OSError, match="failed"):
            await trio.open_tcp_stream("127.0.0.1", port.port)
        [listener] = port.listen()
        async with listener, await trio.open_tcp_stream("127.0.0.1", port.port) as stream:
            await (await listener.accept()).aclose()
            assert await stream.receive_some(1) == b""


def test_a_bound_port_is_free_again() -> None:
    with BoundPort("listenPort", "127.0.0.1", 0) as port:
        number = port.port
    with socket.create_server(("127.0.0.1", number)), pytest.raises(AddressInUse) as caught:
        BoundPort("haListenPort", "127.0.0.1", number)
    assert (caught.value.key, caught.value.host, caught.value.port) == ("haListenPort", "127.0.0.1", number)
    assert "in use" in caught.value.reason


@pytest.mark.parametrize("host", ["10.0.0..1", "x" * 64])
def test_a_host_that_can_be_no_name_is_an_error_of_its_key(host: str) -> None:
    with pytest.raises(AddressInUse, match=f"listenPort: can't listen on {host}:0: it is no host name"):
        BoundPort("listenPort", host, 0)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_of_this_machine(host: str) -> None:
    with pytest.raises(AddressInUse, match="listenPort: can't listen on"):
        BoundPort("listenPort", host, 0)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "192.0.2.1"), (socket.AF_APPLETALK, "::1")])
async def test_addresses_that_are_not_of_this_machine_are_left_out(
    family: int, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if IPv6 was disabled, and the host name still had an IPv6 address."""
    found = [(each, socket.SOCK_STREAM, 0, "", (host, 0)) for each, host in [(family, address), (2, "127.0.0.1")]]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    with BoundPort("listenPort", "localhost", 0) as port:
        [listener] = port.listen()
        await listener.aclose()
    assert f"node.address_unavailable key=listenPort address={address} " in caplog.text
