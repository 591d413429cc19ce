"""The character NUL in properties: after a crash, such a record can't be told from one of which a page was lost."""

from typing import Any

import pytest

from ha.protocol.batch import encode_batch
from ha.protocol.codes import ResponseCode
from tests.broker.node import Node

NUL = "trace\x01" + "\0" * 1200 + "\x02"


@pytest.mark.parametrize(
    ("code", "body", "fields"),
    [
        (310, b"x", {"i": NUL}),
        (310, b"x", {"i": NUL + "DELAY\x011\x02"}),
        (310, b"x", {"i": "é\x01\0\x02"}),
        (320, encode_batch([(0, b"x", b""), (0, b"y", NUL.encode())]), {"m": True}),
        (320, encode_batch([(0, b"x", b""), (0, b"y", b"")]), {"m": True, "i": NUL}),
        (325, b"x", {"i": NUL}),
    ],
    ids=["usual", "delayed", "not ASCII", "one of a batch", "batch", "reply"],
)
async def test_a_send_with_nul_in_its_properties_is_refused(
    node: Node, code: int, body: bytes, fields: dict[str, Any]
) -> None:
    """The log was cut off before such a record after a crash, with all acknowledged messages behind it."""
    answer = await node.send(body, code=code, **fields)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "NUL" in (answer.remark or "")
    assert node.store.log.max_offset.value == 0
