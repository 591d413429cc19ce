"""The users of brokers as a front knows them, on the autojump clock, with a broker of scripted answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ha.protocol import java_json
from ha.protocol.access_bodies import (
    ALLOW,
    CUSTOM,
    SUPER,
    AclInfo,
    PolicyEntryInfo,
    PolicyInfo,
    SubjectRequest,
    UserInfo,
    UserRequest,
)
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import parse_header
from ha.protocol.remoting import RemotingCommand
from ha.proxy.brokers import BrokerUnreachable
from ha.proxy.users import AGE_S_MAX, FIRST_READS_MAX, REFRESH_S, UNUSED_S, BrokerUsers

REAL = json.loads((Path(__file__).parents[1] / "fixtures" / "acl2" / "answers-5.5.0.json").read_text())
POLICY = PolicyInfo(policy_type=CUSTOM, entries=[PolicyEntryInfo(resource="Topic:t", actions=["Pub"], decision=ALLOW)])


class Broker:
    """Answers 3004 and 3009."""

    def __init__(self) -> None:
        self.users = {"u": UserInfo(username="u", password="secret-u", user_type="Normal", user_status="enable")}
        self.policies = {"User:u": [POLICY]}
        self.asked: list[tuple[int, str]] = []
        self.is_gone = False
        self.delay_s = 0.0
        self.at_once = self.at_once_max = self.request_count = 0

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        self.request_count += 1
        self.at_once += 1
        self.at_once_max = max(self.at_once, self.at_once_max)
        await trio.sleep(self.delay_s)
        self.at_once -= 1
        if self.is_gone:
            raise BrokerUnreachable("gone")
        if command.code == RequestCode.AUTH_GET_USER:
            name = parse_header(UserRequest, command.ext_fields).username
            self.asked.append((command.code, name))
            user = self.users.get(name)
            return command.reply(0, body=b"" if user is None else java_json.dumps(user))
        subject = parse_header(SubjectRequest, command.ext_fields).subject
        self.asked.append((command.code, subject))
        if subject not in self.policies:
            return command.reply(0)
        return command.reply(0, body=java_json.dumps(AclInfo(subject=subject, policies=self.policies[subject])))


@asynccontextmanager
async def opened(*, has_policies: bool = True) -> AsyncIterator[tuple[BrokerUsers, Broker]]:
    broker = Broker()
    users = BrokerUsers(broker.ask, has_policies=has_policies)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(users.serve)
        yield users, broker
        nursery.cancel_scope.cancel()


async def test_a_user_is_read_once_with_its_policies(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        for _ in range(3):
            await users.load("u")
        user = users.find("u")
        assert user is not None
        assert (user.password, user.policies) == ("secret-u", [POLICY])
        assert broker.asked == [(RequestCode.AUTH_GET_USER, "u"), (RequestCode.AUTH_GET_ACL, "User:u")]
        await trio.sleep(REFRESH_S + 1)
        assert users.find("u") is user, "nothing has changed"


@pytest.mark.parametrize(("has_policies", "user_type"), [(False, "Normal"), (True, SUPER)])
async def test_policies_are_read_only_if_they_count(
    autojump_clock: MockClock, has_policies: bool, user_type: str
) -> None:
    async with opened(has_policies=has_policies) as (users, broker):
        broker.users["u"].user_type = user_type
        await users.load("u")
        assert users.find("u") is not None
        assert broker.asked == [(RequestCode.AUTH_GET_USER, "u")]


async def test_changes_take_effect(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        await users.load("u")
        broker.users["u"] = UserInfo(username="u", password="another", user_type="Normal", user_status="disable")
        await trio.sleep(REFRESH_S + 1)
        user = users.find("u")
        assert user is not None
        assert (user.password, user.user_status) == ("another", "disable")
        del broker.users["u"]
        await trio.sleep(REFRESH_S + 1)
        assert users.find("u") is None


async def test_a_user_whose_signature_a_broker_refused_is_read_again(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        await users.load("u")
        broker.users["u"].password = "another"
        users.doubt("u")
        users.doubt("nobody")
        assert users.find("u") is not None, "calls under way go on"
        for _ in range(2):
            await users.load("u")
        user = users.find("u")
        assert user is not None
        assert user.password == "another"
        assert len(broker.asked) == 4


async def test_a_user_is_refused_when_no_broker_has_answered_for_a_while(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        await users.load("u")
        broker.is_gone = True
        await trio.sleep(AGE_S_MAX - 1)
        await users.load("u")
        assert users.find("u") is not None
        await trio.sleep(2)
        assert users.find("u") is None
        with pytest.raises(BrokerUnreachable, match="no broker could be asked"):
            await users.load("u")
        broker.is_gone = False
        await users.load("u")
        assert users.find("u") is not None


async def test_a_user_that_a_broker_does_not_show_holds_up_no_other(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        broker.users["v"] = UserInfo(username="v", password="secret")
        for name in ("u", "v"):
            await users.load(name)
        broker.users["u"].password = None
        broker.users["v"].password = "another"
        await trio.sleep(REFRESH_S + 1)
        user = users.find("v")
        assert user is not None
        assert user.password == "another"


async def test_a_broker_that_does_not_answer_is_asked_once_in_each_round(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        broker.users["v"] = UserInfo(username="v", password="secret")
        for name in ("u", "v"):
            await users.load(name)
        broker.is_gone, broker.request_count = True, 0
        await trio.sleep(2 * REFRESH_S + 1)
        assert broker.request_count == 2


async def test_calls_that_waited_for_a_user_do_not_read_it_again(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        broker.delay_s = 1.0
        async with trio.open_nursery() as nursery:
            for _ in range(2 * FIRST_READS_MAX):
                nursery.start_soon(users.load, "nobody")
        assert len(broker.asked) <= FIRST_READS_MAX


async def test_unknown_names_are_remembered(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.proxy.users.UNKNOWN_COUNT_MAX", 3)
    async with opened() as (users, broker):
        for _ in range(3):
            await users.load("nobody")
        assert (users.find("nobody"), len(broker.asked)) == (None, 1)
        broker.users["nobody"] = UserInfo(username="nobody", password="secret")
        await trio.sleep(REFRESH_S + 1)
        await users.load("nobody")
        assert users.find("nobody") is not None, "it was created"
        for number in range(9):
            await users.load(f"n{number}")
        assert len(users._unknown) <= 3
        await users.load("x" * 10_000)
        await users.load("")
        assert len(broker.asked) == 1 + 2 + 9, "not asked about impossible names"


async def test_the_user_that_was_unused_for_the_longest_time_is_forgotten(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ha.proxy.users.KNOWN_COUNT_MAX", 2)
    async with opened() as (users, broker):
        broker.users |= {name: UserInfo(username=name, password="secret") for name in ("v", "w")}
        for name in ("u", "v", "u", "w"):
            await users.load(name)
        assert (users.count, users.find("v")) == (2, None)
        await trio.sleep(UNUSED_S + 2 * REFRESH_S)
        assert users.count == 0


async def test_a_broker_that_hides_passwords_is_no_source(autojump_clock: MockClock) -> None:
    """It shows them to super users only."""
    async with opened() as (users, broker):
        broker.users["u"].password = None
        with pytest.raises(BrokerUnreachable, match="no broker could be asked"):
            await users.load("u")
        assert users.find("u") is None


async def test_a_broker_that_refuses_is_no_source(autojump_clock: MockClock) -> None:
    async def refuse(command: RemotingCommand) -> RemotingCommand:
        return command.reply(ResponseCode.NO_PERMISSION, "no")

    users = BrokerUsers(refuse, has_policies=True)
    with pytest.raises(BrokerUnreachable, match="no broker could be asked"):
        await users.load("u")
    assert users.find("u") is None


@pytest.mark.parametrize(
    ("user", "policies", "status", "entry_count"),
    [
        ("3004 shown", "3009 policies", "enable", 1),
        ("3004 disabled is shown", "3009 nothing is left", "disable", 0),
        ("3004 nobody", "3009 policies of nobody", None, 0),
    ],
)
async def test_answers_of_a_real_broker(user: str, policies: str, status: str | None, entry_count: int) -> None:
    """RocketMQ 5.5.0's, recorded."""

    async def ask(command: RemotingCommand) -> RemotingCommand:
        code, _, body = REAL[user if command.code == RequestCode.AUTH_GET_USER else policies]
        return command.reply(code, body=json.dumps(body).encode() if body else b"")

    users = BrokerUsers(ask, has_policies=True)
    await users.load("bob")
    found = users.find("bob")
    assert (None if found is None else found.user_status) == status
    if found is not None:
        assert found.password == "the-secret-of-bob"
        assert sum(len(policy.entries or ()) for policy in found.policies) == entry_count


async def test_first_reads_are_limited(autojump_clock: MockClock) -> None:
    async with opened() as (users, broker):
        broker.delay_s = 1.0
        async with trio.open_nursery() as nursery:
            for number in range(5 * FIRST_READS_MAX):
                nursery.start_soon(users.load, f"n{number}")
        assert broker.at_once_max == FIRST_READS_MAX
