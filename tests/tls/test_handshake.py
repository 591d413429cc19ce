"""Handshakes that don't come to an end."""

from functools import partial

import pytest
import trio
import trio.testing

from ha.tls.files import TlsFiles, server_context
from ha.tls.handshake import Handshakes
from tests.tls.pki import Pki


@pytest.mark.parametrize("side", ["accept", "connect"])
async def test_a_cancelled_handshake_leaves_no_stream_open(side: str, session_pki: Pki) -> None:
    handshakes = Handshakes()
    ours, theirs = trio.testing.memory_stream_pair()
    if side == "accept":
        files = TlsFiles(certificate=str(session_pki.folder / "server.pem"), key=str(session_pki.folder / "server.key"))
        shake = partial(handshakes.accept, ours, server_context(files))
    else:
        shake = partial(handshakes.connect, ours, session_pki.client(), "localhost")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake)
        await trio.testing.wait_all_tasks_blocked()
        assert handshakes.statistics().under_way == 1
        nursery.cancel_scope.cancel()
    assert handshakes.statistics().under_way == 0
    with pytest.raises(trio.BrokenResourceError):
        await theirs.send_all(b"x")
