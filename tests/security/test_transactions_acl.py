"""Transactions with access control: permissions to end a half message, to find it, and to receive check requests."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ha.acl import AclGuardOptions
from ha.protocol.acl import AclCredentials
from ha.protocol.codes import RequestCode
from ha.protocol.message_id import decode_message_id
from ha.protocol.record import Message, decode_record, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC, POP_TOPIC, SCHEDULE_TOPIC, TABLES_TOPIC
from ha.remoting import open_remoting_client
from tests.broker.node import HOST, PULL, SEND_V2, Node, WallClock
from tests.broker.test_transactions import COMMIT, ROLLBACK, half_properties, place, records
from tests.security.brokers import Client, admin, guarded_broker, policy
from tests.security.test_acl_guard import EXCEPTION, refusal

ACCOUNTS = """
accounts:
  - {accessKey: payer-key, secretKey: the-secret-of-payer, topicPerms: [payments=PUB]}
  - {accessKey: payer-2-key, secretKey: the-secret-of-payer-2, topicPerms: [payments=PUB]}
  - {accessKey: nobody-key, secretKey: the-secret-of-nobody, defaultTopicPerm: DENY, defaultGroupPerm: DENY}
  - {accessKey: other-key, secretKey: the-secret-of-other, topicPerms: [other=PUB]}
  - {accessKey: reader-key, secretKey: the-secret-of-reader, defaultTopicPerm: PUB|SUB, defaultGroupPerm: SUB}
  - {accessKey: admin-key, secretKey: the-secret-of-admin, admin: true}
"""
DENIED = EXCEPTION + "No default permission for topic:payments"


def credentials(name: str) -> AclCredentials:
    return AclCredentials(f"{name}-key", f"the-secret-of-{name}")


async def send_half(client: Client, body: bytes = b"half", topic: str = "payments") -> RemotingCommand:
    """Sends a half message, born now."""
    ext = {**SEND_V2, "b": topic, "f": 4, "g": WallClock()(), "i": half_properties()}
    answer = await client.ask(310, body, **ext)
    assert answer.code == 0, answer.remark
    return answer


async def end(client: Client, where: dict[str, Any], what: int, **changes: Any) -> RemotingCommand:
    ext = {"producerGroup": "pg", "commitOrRollback": what, "msgId": "X", **where, **changes}
    return await client.ask(RequestCode.END_TRANSACTION, **ext)


@asynccontextmanager
async def producer(node: Node, name: str, client_id: str) -> AsyncIterator[tuple[Client, list[RemotingCommand]]]:
    """A client of producer group pg with its own connection, and the checks that it receives."""
    received: list[RemotingCommand] = []

    async def on_request(connection: object, commands: list[RemotingCommand]) -> None:
        received.extend(commands)

    async with open_remoting_client(connect=node.connect, handler=on_request) as remoting:
        client = Client(Node(node.store, node.ha, node.broker, remoting, node.listener), credentials(name))
        body = json.dumps({"clientID": client_id, "producerDataSet": [{"groupName": "pg"}]}).encode()
        assert (await client.ask(RequestCode.HEART_BEAT, body)).code == 0
        yield client, received


async def test_lists_of_exceptions_count_for_ends_of_transactions(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path, ACCOUNTS) as node:
        payer, nobody = Client(node, credentials("payer")), Client(node, None)
        guard, codes = node.broker.acl_guard, frozenset({"37"})
        assert guard is not None
        where, second = place(await send_half(payer)), place(await send_half(payer))
        guard._options = AclGuardOptions(unauthenticated_codes=codes)
        claims: list[dict[str, Any]] = [{}, {"AccessKey": "payer-key"}]
        for forged in claims:
            assert (await end(nobody, where, COMMIT, **forged)).code in (1, 16)
        guard._options = AclGuardOptions(unauthorized_codes=codes)
        assert (await end(Client(node, credentials("other")), where, COMMIT)).remark == DENIED, "it is about users"
        assert await records(node, "payments", 0) == []
        guard._options = AclGuardOptions(unauthenticated_codes=codes, unauthorized_codes=codes)
        assert (await end(nobody, where, COMMIT)).code == 0
        [record] = await records(node, "payments", 0)
        assert record.body == b"half"
        assert (await end(Client(node, credentials("other")), second, COMMIT)).code == 0, "nobody needs a right"


async def test_ending_a_half_message_needs_pub_on_its_topic(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path, ACCOUNTS) as node:
        payer = Client(node, credentials("payer"))
        first, second = place(await send_half(payer)), place(await send_half(payer))
        for name in ("nobody", "other"):
            stranger = Client(node, credentials(name))
            for what in (COMMIT, ROLLBACK):
                # 4.9's clients name no topic, 5.x's name it; neither is trusted.
                for topic in (None, "payments", "other", HALF_TOPIC):
                    refused = await end(stranger, first, what, topic=topic)
                    assert refused.code in (1, 16), (name, what, topic)
                assert (await end(stranger, first, what)).remark == DENIED
        assert await records(node, "payments", 0) == []
        assert await records(node, OP_TOPIC, 0) == []
        assert (await end(payer, first, COMMIT)).code == 0
        assert (await end(Client(node, credentials("payer-2")), second, ROLLBACK, topic="payments")).code == 0
        [record] = await records(node, "payments", 0)
        assert record.body == b"half"
        third = place(await send_half(payer))
        assert (await end(admin(node), third, COMMIT)).code == 0


async def test_check_requests_need_pub_on_the_topic(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path, ACCOUNTS) as node, producer(node, "nobody", "n") as (nobody, overheard):
        async with producer(node, "payer", "p") as (payer, asked):
            for number in range(4):
                await send_half(payer, b"secret %d" % number)
            await trio.sleep(100)
            assert sorted({decode_record(each.body).body[-1:] for each in asked}) == [b"0", b"1", b"2", b"3"]
        await trio.sleep(200)  # the rest of the group alone
        assert node.broker.transactions.statistics().unasked_count > 0
        assert [each.code for each in overheard] == []
        assert nobody.node.client is not payer.node.client


async def test_revoked_right_stops_check_requests(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path, ACCOUNTS) as node, producer(node, "payer", "p") as (payer, asked):
        await send_half(payer)
        assert node.broker.acl_guard is not None
        node.broker.acl_guard.policy = policy(ACCOUNTS.replace("payments=PUB", "payments=SUB"))
        await trio.sleep(200)
        assert asked == []


SYSTEM = (HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, GIVEN_UP_TOPIC, TABLES_TOPIC, POP_TOPIC, "rmq_sys_REVIVE_LOG_C")


@pytest.mark.parametrize("name", ["nobody", "reader"])
async def test_system_topics_need_an_admin(autojump_clock: MockClock, tmp_path: Path, name: str) -> None:
    """Also for an account with a right on every topic by default."""
    async with guarded_broker(tmp_path, ACCOUNTS) as node:
        await send_half(Client(node, credentials("payer")))
        await node.dispatched()
        stranger = Client(node, credentials(name))
        for topic in SYSTEM:
            queue = {"topic": topic, "queueId": 0}
            for code, ext in (
                (11, {**PULL, "topic": topic}),
                (361, {**PULL, "topic": topic}),
                (12, {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}),
                (14, {**queue, "consumerGroup": "g"}),
                (15, {**queue, "consumerGroup": "g", "commitOffset": 0}),
                (29, {**queue, "timestamp": 0}),
                (30, queue),
                (31, queue),
                (32, queue),
                (33, {"topic": topic, "offset": 0}),
                (202, {"topic": topic}),
                (208, {"consumerGroup": "g", "topic": topic}),
                (208, {"consumerGroup": "g", "topicList": f"TT;{topic}"}),
                (300, {"topic": topic}),
                (303, {"topic": topic, "group": "g"}),
                (308, {"topic": topic, "filterGroups": "", "compareGroup": "g"}),
                (315, {"statsName": "TOPIC_PUT_NUMS", "statsKey": topic}),
                (321, {**queue, "index": 0, "count": 10}),
                (345, {"topic": topic, "group": "g"}),
                (351, {"topic": topic}),
            ):
                assert await refusal(stranger, code, **ext) != "", (code, topic)
                assert await refusal(admin(node), code, **ext) == "", (code, topic)


async def test_offsets_without_a_half_message_are_refused(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path, ACCOUNTS) as node:
        payer = Client(node, credentials("payer"))
        plain = await payer.ask(310, b"plain", **{**SEND_V2, "b": "payments"})
        where = place(await send_half(payer))
        half_at, end_at = where["commitLogOffset"], node.store.log.max_offset.value
        inside = set(range(end_at + 1)) - {half_at}
        for offset in (*inside, -1, -(2**63), 2**31, 2**40, 2**63 - 1):
            for what in (COMMIT, ROLLBACK):
                refused = await end(payer, {**where, "commitLogOffset": offset}, what)
                assert refused.code == 1
                assert (refused.remark or "").startswith("Find prepared transaction message failed"), offset
        for garbage in ("", "x", "²", str(2**63), str(-(2**70)), "9" * 4000):
            refused = await end(payer, {**where, "commitLogOffset": garbage}, COMMIT)
            assert refused.code == 1
            assert "commitLogOffset" in (refused.remark or "")
        refused = await end(
            payer, {**where, "commitLogOffset": decode_message_id(plain.ext_fields["msgId"])[2]}, COMMIT
        )
        assert refused.code == 1
        assert (await end(payer, where, COMMIT)).code == 0


async def test_forged_record_inside_a_body_is_refused(autojump_clock: MockClock, tmp_path: Path) -> None:
    """An account with PUB on another topic sends a body that looks like a half message with a foreign queue offset."""
    async with guarded_broker(tmp_path, ACCOUNTS) as node:
        foreign = place(await send_half(Client(node, credentials("payer"))))
        other = Client(node, credentials("other"))
        probe = await other.ask(310, b"x", **{**SEND_V2, "b": "other", "i": ""})
        before = decode_message_id(probe.ext_fields["msgId"])[2]
        size = node.store.log.max_offset.value - before
        inside = before + size + 84 + 4  # behind the fixed fields and the body's length
        properties = b"TRAN_MSG\x01true\x02PGROUP\x01pg\x02REAL_TOPIC\x01other\x02REAL_QID\x010\x02"
        forged = encode_record(
            Message(HALF_TOPIC, 0, b"forged", properties),
            queue_offset=foreign["tranStateTableOffset"],
            physical_offset=inside,
            store_timestamp_ms=1,
            store_host=encode_host(HOST, 1),
        )
        sent = await other.ask(310, forged, **{**SEND_V2, "b": "other", "i": ""})
        at = decode_message_id(sent.ext_fields["msgId"])[2]
        raw = await node.store.log.read_all(inside, len(forged))
        assert at < inside
        assert bytes(raw) == forged  # it stands where it says
        refused = await end(other, {**foreign, "commitLogOffset": inside}, ROLLBACK)
        assert refused.code == 1
        assert (refused.remark or "").startswith("Find prepared transaction message failed")
        await trio.sleep(1)
        assert await records(node, OP_TOPIC, 0) == []
        assert (await end(Client(node, credentials("payer")), foreign, COMMIT)).code == 0
        [record] = await records(node, "payments", 0)
        assert record.body == b"half"


async def test_no_reply_is_pushed_while_two_accounts_claim_a_client_id(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """A consumer of requests sees the client ids in them, and could claim one to receive the replies of others."""
    marks = "CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01asker\x02MSG_TYPE\x01reply\x02"
    reply = {**SEND_V2, "b": "C_REPLY_TOPIC", "i": marks}
    async with guarded_broker(tmp_path, ACCOUNTS) as node, producer(node, "payer", "asker") as (_, asked):
        replier = Client(node, credentials("reader"))
        async with producer(node, "nobody", "asker") as (_, overheard):
            answer = await replier.ask(324, b"for the payer", **reply)
            assert (answer.code, answer.remark) == (1, "push reply message fail, channel of <asker> not found.")
            assert (asked, overheard) == ([], [])
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await replier.ask(324, b"for the payer", **reply)
        assert [bytes(each.body) for each in asked] == [b"for the payer"]
