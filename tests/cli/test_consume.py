"""`ha consume`: whole command lines, what is printed, exit codes, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import zlib
from typing import Any

import msgspec
import pytest
import trio

from ha.cli import run
from ha.client import MessageQueue, PullConsumer, PullResult, PullStatus
from ha.errors import BrokerError, ConnectionFailed, RemoteProtocolError, RequestTimedOut
from ha.protocol.codes import SysFlag
from ha.protocol.properties import encode_properties
from tests.cli.conftest import QUEUE_COUNT, OneBroker


@pytest.fixture
def filled(broker: OneBroker) -> OneBroker:
    """Ten messages over four queues, two or three each."""
    for number in range(10):
        properties = encode_properties({"TAGS": "even" if number % 2 == 0 else "odd", "KEYS": f"k{number}"})
        broker.put(number % QUEUE_COUNT, b"message %d" % number, properties)
    return broker


def consume(broker: OneBroker, *arguments: str) -> int:
    return run(["consume", "T", "--servers", broker.name_server, *arguments])


def first_lines(broker: OneBroker, count: int, *arguments: str) -> list[bytes]:
    """The first lines that a process of its own prints, which must then end at Ctrl-C without a word."""
    command = [sys.executable, "-m", "ha.cli", "consume", "T", "--servers", broker.name_server, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            lines = [process.stdout.readline() for _ in range(count)]
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()
    return lines


def test_bodies_each_on_a_line(filled: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert consume(filled) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert sorted(lines) == [f"message {number}".encode() for number in range(10)]


def test_json_lines(filled: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert consume(filled, "--json") == 0
    messages = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert sorted(message["body"] for message in messages) == [f"message {number}" for number in range(10)]
    assert {(message["topic"], message["broker"]) for message in messages} == {("T", "a")}
    places = {(message["queue"], message["queue_offset"]) for message in messages}
    assert len(places) == 10
    assert {message["tags"] for message in messages} == {"even", "odd"}


def test_json_does_not_control_the_terminal(broker: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    evil = "x\x1b[2J\x7f\x9b2J\u202e"
    broker.put(0, evil.encode(), encode_properties({"a": evil}))
    assert consume(broker, "--json") == 0
    shown = capsysbinary.readouterr().out.decode()
    assert not set("\x1b\x7f\x9b\u202e") & set(shown)
    message = json.loads(shown)
    assert (message["body"], message["properties"]["a"]) == (evil, evil)


def test_bodies_that_are_no_text_are_base64_in_json(
    broker: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["produce", "T", "--servers", broker.name_server, "--body", "\udcff\udcfe"]) == 0
    capsysbinary.readouterr()
    assert consume(broker, "--json") == 0
    message = json.loads(capsysbinary.readouterr().out)
    assert message["body_base64"] == "//4="
    assert "body" not in message


def test_a_body_that_does_not_inflate_is_named_and_the_others_are_shown(
    broker: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for body in (b"before", zlib.compress(bytes(1001)), b"behind"):
        broker.put(1, body, sys_flag=SysFlag.COMPRESSED if body[:1] == b"x" else 0)
    arguments = ("--queue", "1", "--max-message-size", "1000")
    assert consume(broker, *arguments) == 1
    shown = capsysbinary.readouterr()
    assert shown.out == b"before\nbehind\n"
    assert shown.err == (
        b"ha: T queue 1 of a, queue offset 1: a zlib body of 17 bytes inflates to more than 1000 bytes, "
        b"the longest body that is accepted (maxMessageSize)\n"
    )
    assert consume(broker, *arguments, "--json") == 0
    messages = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [message.get("body") for message in messages] == ["before", None, "behind"]
    assert "more than 1000 bytes" in messages[1]["body_error"]
    assert consume(broker, "--queue", "1", "--max-message-size", "1001") == 0


def test_limit_tags_and_one_queue(filled: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert consume(filled, "--limit", "3") == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == 3
    assert consume(filled, "--tags", "odd") == 0
    odd = [f"message {number}".encode() for number in (1, 3, 5, 7, 9)]
    assert sorted(capsysbinary.readouterr().out.splitlines()) == odd
    assert consume(filled, "--queue", "2", "--json") == 0
    assert {json.loads(line)["queue"] for line in capsysbinary.readouterr().out.splitlines()} == {2}


def test_where_it_starts(filled: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert consume(filled, "--from", "last") == 0
    assert capsysbinary.readouterr().out == b""
    assert consume(filled, "--from", "1", "--json") == 0
    offsets = [json.loads(line)["queue_offset"] for line in capsysbinary.readouterr().out.splitlines()]
    assert len(offsets) == 6
    assert min(offsets) == 1


def test_committed_offsets_go_on_where_the_last_run_ended(
    filled: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert consume(filled, "--from", "committed", "--commit", "--limit", "4", "--queue", "0") == 0
    first = capsysbinary.readouterr().out.splitlines()
    assert consume(filled, "--from", "committed", "--commit") == 0
    second = capsysbinary.readouterr().out.splitlines()
    assert len(first) + len(second) == 10
    assert consume(filled, "--from", "committed", "--commit") == 0
    assert capsysbinary.readouterr().out == b""


def test_a_backlog_is_skipped(filled: OneBroker) -> None:
    assert consume(filled, "--from", "last", "--commit") == 0
    assert filled.committed == {0: 3, 1: 3, 2: 2, 3: 2}


@pytest.mark.parametrize(
    ("failure", "code"), [(BrokerError("b:1", 1, "no"), 1), (RemoteProtocolError("no offset"), 69)]
)
def test_a_failed_commit_does_not_prevent_the_others(
    filled: OneBroker,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    failure: Exception,
    code: int,
) -> None:
    commit, tried = PullConsumer.commit, list[MessageQueue]()

    async def first_fails(self: PullConsumer, queue: MessageQueue, queue_offset: int) -> None:
        tried.append(queue)
        if len(tried) == 1:
            raise failure
        await commit(self, queue, queue_offset)

    monkeypatch.setattr(PullConsumer, "commit", first_fails)
    assert consume(filled, "--commit") == code
    assert len(capsysbinary.readouterr().out.splitlines()) == 10
    assert filled.committed.keys() == set(range(QUEUE_COUNT)) - {tried[0].queue_id}


@pytest.mark.parametrize("failure", [RequestTimedOut("b:1", 5), ConnectionFailed("b:1", "lost")])
def test_an_unreachable_broker_gets_no_further_commits(
    filled: OneBroker, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    tried = list[MessageQueue]()

    async def fail(self: PullConsumer, queue: MessageQueue, queue_offset: int) -> None:
        tried.append(queue)
        raise failure

    monkeypatch.setattr(PullConsumer, "commit", fail)
    assert consume(filled, "--commit") == 69
    assert len(tried) == 1


def test_messages_behind_the_end_are_not_committed(
    filled: OneBroker, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """They came after the start, with the same pull as the last one that is printed."""

    async def end_at_start(self: PullConsumer, queue: MessageQueue) -> int:
        return 1

    monkeypatch.setattr(PullConsumer, "max_offset", end_at_start)
    assert consume(filled, "--commit") == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == QUEUE_COUNT
    assert filled.committed == dict.fromkeys(range(QUEUE_COUNT), 1)


def test_messages_behind_the_limit_are_not_committed(
    filled: OneBroker, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """All queues are pulled when one of them reaches it."""
    pull, arrived_count, everyone = PullConsumer.pull, 0, trio.Event()

    async def pull_together(self: PullConsumer, *arguments: Any, **settings: Any) -> PullResult:
        nonlocal arrived_count
        result = await pull(self, *arguments, **settings)
        arrived_count += 1
        if arrived_count == QUEUE_COUNT:
            everyone.set()
        await everyone.wait()
        return result

    monkeypatch.setattr(PullConsumer, "pull", pull_together)
    assert consume(filled, "--commit", "--limit", "1") == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == 1
    assert sum(filled.committed.values()) == 1


def test_a_message_that_can_not_be_read_yet_is_waited_for(
    filled: OneBroker, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The broker answers as at the end of the queue while it still tries to repair it."""
    monkeypatch.setattr("ha.client.reading._PAUSE_S", 0.0)
    pull, tried = PullConsumer.pull, set[tuple[MessageQueue, int]]()

    async def repaired_later(self: PullConsumer, queue: MessageQueue, queue_offset: int, **settings: Any) -> PullResult:
        result = await pull(self, queue, queue_offset, **settings)
        if (queue, queue_offset) in tried:
            return result
        tried.add((queue, queue_offset))
        nothing: dict[str, Any] = {"status": PullStatus.NO_NEW_MSG, "messages": [], "next_offset": queue_offset}
        return msgspec.structs.replace(result, **nothing)

    monkeypatch.setattr(PullConsumer, "pull", repaired_later)
    assert consume(filled) == 0
    shown = capsysbinary.readouterr()
    assert len(shown.out.splitlines()) == 10
    places = {line.partition(b" queue=")[0] for line in shown.err.splitlines()}
    assert places == {b"ha: client.message_not_readable"}


def test_ctrl_c_commits_what_was_printed(filled: OneBroker) -> None:
    assert len(set(first_lines(filled, 10, "--follow", "--from", "committed", "--commit"))) == 10
    assert sum(filled.committed.values()) == 10


def test_a_group_goes_on_where_it_was(filled: OneBroker, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert consume(filled, "--group", "g", "--limit", "4") == 0
    first = capfdbinary.readouterr()
    assert consume(filled, "--group", "g", "--limit", "6", "--json") == 0
    second = capfdbinary.readouterr()
    printed = [*first.out.splitlines(), *(json.loads(line)["body"].encode() for line in second.out.splitlines())]
    assert sorted(printed) == [f"message {number}".encode() for number in range(10)]
    assert sum(filled.committed.values()) == 10
    assert (first.err, second.err) == (b"", b"")


def test_a_member_ends_at_ctrl_c(filled: OneBroker) -> None:
    lines = first_lines(filled, 5, "--group", "g", "--tags", "odd")
    assert sorted(lines) == [f"message {number}\n".encode() for number in (1, 3, 5, 7, 9)]


@pytest.mark.parametrize("arguments", [[], ["--group", "g"], ["--follow"]])
def test_it_ends_when_nobody_reads_on(filled: OneBroker, arguments: list[str]) -> None:
    """As with `| head`. A member must not take the error for one of the message, which would become a dead letter."""
    for number in range(10, 5000):
        filled.put(number % QUEUE_COUNT, b"%d" % number * 100)
    command = [sys.executable, "-m", "ha.cli", "consume", "T", "--servers", filled.name_server, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(20) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--group", "g", "--commit"], "can't be combined with"),
        (["--group", "g", "--queue", "1"], "can't be combined with"),
        (["--group", "g", "--from", "7"], "can't be combined with"),
        (["--from", "yesterday"], "first, last, committed"),
        (["--from", "²"], "first, last, committed"),
        (["--broker", "²"], "suggested, master, slave"),
        (["--broker", "best"], "suggested, master, slave"),
        pytest.param(["--from", "9" * 5000], "first, last, committed", id="digits of an offset"),
        pytest.param(["--broker", "9" * 5000], "suggested, master, slave", id="digits of an ID"),
        (["--limit", "0"], "at least 1"),
        (["--tags", "||"], "--tags: '||' names no tag"),
        (["--group", "g", "--tags", "||"], "--tags: '||' names no tag"),
        (["--group", ""], "--group must not be empty"),
        (["--queue", "77"], "no readable queue 77"),
    ],
)
def test_usage_errors(broker: OneBroker, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert consume(broker, *arguments) == 2
    assert said in capsys.readouterr().err


def test_no_such_topic_and_no_slave(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    for group in ([], ["--group", "g"]):
        assert run(["consume", "Other", "--servers", broker.name_server, *group]) == 2
        wanted = "ha: no topic Other; ha topic list shows the topics, ha topic create adds one\n"
        assert capsys.readouterr().err == wanted
    assert consume(broker, "--broker", "slave") == 69
    assert "no slave is registered" in capsys.readouterr().err
    assert consume(broker, "--broker", "7") == 69
    assert "ha: a: no broker with ID 7 is registered; IDs: 0\n" in capsys.readouterr().err


def test_ctrl_c_ends_following_without_a_word(filled: OneBroker) -> None:
    assert len(set(first_lines(filled, 10, "--follow"))) == 10


def test_following_goes_on_when_a_broker_is_silent_busy_or_gone_for_a_while(
    filled: OneBroker, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("ha.cli.consume.RECONNECT_PAUSE_S", 0.01)
    failures = [
        RequestTimedOut("a:1", 25),
        BrokerError("a:1", 2, "not the master"),
        BrokerError("a:1", 1500, "shutting down"),
        ConnectionFailed("a:1", "lost"),
    ]
    pull = PullConsumer.pull

    async def pull_after_failures(self: PullConsumer, *arguments: Any, **settings: Any) -> PullResult:
        if failures:
            raise failures.pop()
        return await pull(self, *arguments, **settings)

    monkeypatch.setattr(PullConsumer, "pull", pull_after_failures)
    assert consume(filled, "--follow", "--limit", "10") == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == 10


def test_following_asks_no_broker_in_a_tight_loop(broker: OneBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.cli.consume.RECONNECT_PAUSE_S", 3600)
    questions = 0
    pull = PullConsumer.pull

    async def interrupt() -> None:
        # From within: between two turns of its event loop trio would be torn down half way.
        await trio.sleep(0.3)
        signal.raise_signal(signal.SIGINT)

    async def counted(self: PullConsumer, *arguments: Any, **settings: Any) -> PullResult:
        nonlocal questions
        questions += 1
        if questions == 1:
            trio.lowlevel.spawn_system_task(interrupt)
        return await pull(self, *arguments, **settings)

    monkeypatch.setattr(PullConsumer, "pull", counted)
    assert consume(broker, "--follow", "--queue", "0") == 130
    assert questions == 1


def test_a_reader_that_has_had_enough(filled: OneBroker) -> None:
    command = [sys.executable, "-m", "ha.cli", "consume", "T", "--servers", filled.name_server]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=20, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")
