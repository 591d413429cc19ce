"""What POP consumers send, and the records of their state in the log."""

from ha.broker.pop.state import Limits, PopState
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.pop import BATCH_ACK_SIZE_MAX, BatchAckBody, Handle, parse_handle
from ha.protocol.pop_records import (
    OrderedRecord,
    OrderRecord,
    PopRecord,
    QueueRecord,
    TakenRecord,
    decode_pop_record,
    encode_pop_record,
)
from tests.fuzz.harness import Harness

COUNT_MAX = 10_000
LIMITS = Limits(per_queue=100, total=100, queue_count=100)


def pop_records(data: bytes) -> None:
    """Any body of a record: the one error, or a record that is the same when written and read again, and a state whose
    snapshot gives the same state."""
    try:
        record = decode_pop_record(data)
    except RemoteProtocolError:
        return
    assert decode_pop_record(encode_pop_record(record)) == record
    if sum(sum(taken.runs[1::2]) for queue in record.queues for taken in queue.taken) > COUNT_MAX:
        return  # the memory that they take is what the limits of a broker are for
    state = PopState(LIMITS)
    state.apply(record)
    again = PopState(LIMITS)
    for part in state.snapshot(1000):
        again.apply(decode_pop_record(encode_pop_record(part)))
    assert described(again) == described(state)
    state.apply(record)
    assert described(again) == described(state), "applying a record twice changes something"


def described(state: PopState) -> dict[object, object]:
    """The content of a state."""
    assert state.in_flight_count == sum(len(queue.batches) for queue in state.queues.values())
    return {
        key: (
            queue.next_offset,
            queue.order,
            {offset: (batch.pop_time_ms, batch.due_ms, batch.is_suspended) for offset, batch in queue.batches.items()},
        )
        for key, queue in state.queues.items()
    }


def pop_handles(data: bytes) -> None:
    """Any text: the one error, or a handle that is the same when written and read again."""
    try:
        handle = parse_handle(data.decode("latin-1"))
    except RemoteProtocolError:
        return
    assert parse_handle(handle.encode()) == handle


def batch_acks(data: bytes) -> None:
    """Any body of a batch acknowledgement: the one error, or offsets within the limit."""
    try:
        for ack in java_json.read_as(BatchAckBody, data).acks[:16]:
            offsets = list(ack.offsets())
            assert len(offsets) <= 8 * BATCH_ACK_SIZE_MAX
            assert all(ack.start_offset <= offset for offset in offsets)
            assert ack.real_topic().endswith(ack.topic)
    except RemoteProtocolError:
        pass


QUEUE = QueueRecord(
    "g",
    "TT",
    0,
    0,
    130,
    [TakenRecord(1, 2, 0, [120, 8, 129, 1]), TakenRecord(1, 3, 1, [128, 1])],
    [100, 20],
    OrderRecord(1, 2, "attempt", [OrderedRecord(120, 1, 2, 1), OrderedRecord(121, 0, 2)]),
)


def record_seeds() -> list[bytes]:
    """Changes, a removal, and the end of a snapshot."""
    others = [QueueRecord("g", "TT", 0, 2), QueueRecord("h", "TT", 1, 1, 5)]
    records = (PopRecord(), PopRecord(queues=[QUEUE]), PopRecord(queues=others), PopRecord(first=7))
    return [encode_pop_record(record) for record in records]


def handle_seeds() -> list[bytes]:
    """A handle as clients make it, and as the gRPC proxy does."""
    handle = Handle(
        start_offset=120,
        pop_time_ms=1795705617818,
        invisible_ms=15000,
        revive_queue=0,
        flag=1,
        broker_name="broker-a",
        queue_id=3,
        offset=121,
    )
    return [handle.encode().encode(), b"16 1795705617818 15000 999 0 broker-a 3 16 41389308"]


def ack_seeds() -> list[bytes]:
    """Acknowledgements of a topic and of a retry topic."""
    return [
        b'{"brokerName":"b0","acks":[{"c":"g","t":"TT","r":"0","so":0,"q":0,"rq":0,"pt":1,"it":1,"b":"fwM="}]}',
        b'{"acks":[{"c":"g","t":"TT","r":"2","so":7,"q":1,"rq":999,"pt":1,"b":""}]}',
    ]


WORDS = (b'"queues":[', b'"first":', b'"so":', b'"b":"', b" 999 ", b"9223372036854775808", b"-1", b"null", b"[[[[")

HARNESSES = {
    "pop_records": Harness(run=pop_records, seeds=record_seeds, words=WORDS),
    "pop_handles": Harness(run=pop_handles, seeds=handle_seeds, words=WORDS),
    "batch_acks": Harness(run=batch_acks, seeds=ack_seeds, words=WORDS),
}
