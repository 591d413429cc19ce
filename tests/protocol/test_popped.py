"""Receipt handles that a client makes from the response to a pop (spec pop.md, section 2)."""

import pytest

from ha.errors import RemoteProtocolError
from ha.protocol.pop import PopMessageResponse
from ha.protocol.popped import read_popped
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand


def response(
    topic: str = "t", *, starts: str = "0 3 120;1 0 7;2 0 8", queue_id: int = 3, **properties: str
) -> RemotingCommand:
    """The response to a pop at time 50 with one message, of offset 125."""
    header = PopMessageResponse(pop_time=50, invisible_time=900, revive_qid=2, rest_num=0, start_offset_info=starts)
    record = encode_record(
        Message(topic, queue_id, b"body", encode_properties(properties)),
        queue_offset=125,
        physical_offset=4000,
        store_timestamp_ms=0,
        store_host=encode_host("10.0.0.1", 10911),
    )
    return RemotingCommand(0, ext_fields=header.to_ext_fields(), body=record)


def receipt(answer: RemotingCommand) -> str:
    [popped] = read_popped(answer, "b")
    return popped.receipt.encode()


def test_handle_of_a_message_of_the_topic() -> None:
    assert receipt(response()) == "120 50 900 2 0 b 3 125 4000"
    assert receipt(response(starts="")) == "125 50 900 2 0 b 3 125 4000"


def test_handle_that_the_broker_put_into_a_retry() -> None:
    assert receipt(response(queue_id=0, POP_CK="7 49 800 1 1 b0 0 125")) == "7 49 800 1 1 b0 0 125 4000"


@pytest.mark.parametrize(
    "copied", ["", "no handle", "120 49 900 2 0 b 3 125", "7 49 900 2 1 b 0 125", "7 49 900 2 1 b 3 124", "9" * 30]
)
def test_handle_that_a_producer_copied_is_not_used(copied: str) -> None:
    assert receipt(response(POP_CK=copied)) == "120 50 900 2 0 b 3 125 4000"


@pytest.mark.parametrize(("topic", "flag", "start"), [("%RETRY%g_t", 1, 7), ("%RETRY%g+t", 2, 8)])
def test_handle_of_a_retry_without_one(topic: str, flag: int, start: int) -> None:
    """It is in the retry topic if it had no room for the property."""
    assert receipt(response(topic, queue_id=0)) == f"{start} 50 900 2 {flag} b 0 125 4000"


def test_retry_topic_of_rocketmq_4_popped_by_its_own_name() -> None:
    assert receipt(response("%RETRY%g", starts="0 3 120")) == "120 50 900 2 0 b 3 125 4000"


@pytest.mark.parametrize("starts", ["0 3 x", "0 x 120", "x 3 120"])
def test_malformed_start_offsets(starts: str) -> None:
    with pytest.raises(RemoteProtocolError, match="startOffsetInfo"):
        read_popped(response(starts=starts), "b")
