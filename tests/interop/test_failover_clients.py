"""RocketMQ's own clients with a failover group: they continue with the next master and lose nothing acknowledged.

They refresh routes every second here; the default is 30 s (pollNameServerInterval).
"""

from pathlib import Path

import pytest
import trio

from tests.failover.etcd_servers import require_etcd
from tests.failover.members import open_group
from tests.interop.java_client import open_java_client, read_acks
from tests.interop.processes import Children
from tests.interop.releases import Release

PATIENCE_S = 120.0


@pytest.mark.usual_release("4.9.7")
async def test_java_clients_go_on_with_the_next_master(workplace: Path, children: Children, release: Release) -> None:
    require_etcd()
    acks = workplace / "acks"
    async with (
        open_group(workplace, 1, 2, 3) as members,
        open_java_client(children, release, members.name_server) as java,
    ):
        await members.wait_set(1, 2, 3)
        sending = await java.start("produce", topic="T", threads=8, count=6000, acks=acks, limitS=int(PATIENCE_S))
        await sending.wait("progress", PATIENCE_S, acked=1000)
        consuming = await java.start("push", topic="T", group="readers", count=1_000_000, limitS=int(PATIENCE_S))
        await consuming.wait("got", PATIENCE_S)
        killed = members.master_id
        assert killed is not None
        await members.master.kill()
        heir = await members.wait_another(killed)
        await sending.wait("progress", PATIENCE_S, acked=3000)
        members.start_soon(killed)
        await members.wait_ready(killed)
        await members.wait_set(1, 2, 3)
        assert (await members.switch(killed, asked=heir))["is_done"]
        done = (await sending.result(PATIENCE_S))[-1]
        assert done["acked"] == done["SEND_OK"] == 6000, done
        told = {(ack.queue_id, ack.queue_offset): (ack.sequence, ack.crc) for ack in read_acks(acks)}
        assert len(told) == 6000  # every reported offset is unique
        # The consumer receives each of them, at the offset reported to its producer.
        left = dict(told)
        seen = 0
        with trio.fail_after(PATIENCE_S):
            while left:
                while seen == len(consuming.events):
                    await consuming.grown.wait()
                event = consuming.events[seen]
                seen += 1
                assert event["event"] in ("started", "got"), event
                if event["event"] == "got":
                    place = event["queueId"], event["queueOffset"]
                    assert told.get(place, event_message(event)) == event_message(event)
                    left.pop(place, None)


def event_message(event: dict[str, int]) -> tuple[int, int]:
    """What the consumer got, as the producer knows it."""
    return event["sequence"], event["crc"]
