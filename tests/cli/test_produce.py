"""`ha produce`: whole command lines, what is sent, what is printed, exit codes."""

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ha.cli import run
from ha.protocol.properties import decode_properties
from tests.cli.conftest import OneBroker
from tests.scenarios.brokers import eventually


@pytest.fixture
def lines_on_stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "stdin").write_bytes(b"one\ntwo\r\n\nthree")
    with (tmp_path / "stdin").open() as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        yield


def produce(broker: OneBroker, *arguments: str) -> int:
    return run(["produce", "T", "--servers", broker.name_server, *arguments])


def test_one_message_with_tag_and_keys(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert produce(broker, "--body", "hellö", "--tag", "A", "--key", "k0", "--key", "k1") == 0
    (command,) = broker.sends
    properties = decode_properties(command.ext_fields["i"].encode())
    assert bytes(command.body) == "hellö".encode()
    assert (properties["TAGS"], properties["KEYS"]) == ("A", "k0 k1")
    out = capsys.readouterr().out
    assert out.startswith(f"SEND_OK {properties['UNIQ_KEY']} T/a/")


@pytest.mark.parametrize("words", [["--body", "x"], ["--body", "x", "--count", "2"], ["--body", "x", "--json"]])
@pytest.mark.parametrize("code", [0, 1, 13])
def test_a_brokers_text_does_not_control_the_terminal(
    code: int, words: list[str], broker: OneBroker, capfd: pytest.CaptureFixture[str]
) -> None:
    broker.send_code, broker.send_remark = code, "full\x1b[2J\x07\x9b2J\nsee the log"
    assert produce(broker, *words) == (1 if code else 0)
    captured = capfd.readouterr()
    assert not set("\x1b\x07\x9b") & set(captured.out + captured.err)
    if code:
        assert "full\\u001b[2J\\u0007\\u009b2J" in captured.err


def test_lines_of_a_file(broker: OneBroker, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"one\ntwo\r\n\nthree")
    assert produce(broker, "--file", str(tmp_path / "lines"), "--in-flight", "1") == 0
    assert broker.bodies() == [b"one", b"two", b"three"]


@pytest.mark.parametrize("arguments", [["--stdin"], []])
@pytest.mark.usefixtures("lines_on_stdin")
def test_lines_of_standard_input(broker: OneBroker, arguments: list[str]) -> None:
    assert produce(broker, "--in-flight", "1", *arguments) == 0
    assert broker.bodies() == [b"one", b"two", b"three"]


def test_a_line_is_sent_when_it_comes(broker: OneBroker) -> None:
    """Not when the next one does: whoever types, or follows a log, may take his time."""
    command = [sys.executable, "-m", "ha.cli", "produce", "T", "--servers", broker.name_server, "--stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(b"one\n")
            process.stdin.flush()
            eventually("the first line is sent", lambda: broker.bodies() == [b"one"], 20)
            process.stdin.write(b"two\nthree")
            process.stdin.close()
            assert (process.wait(10), process.stderr.read().startswith(b"sent 3 SEND_OK")) == (0, True)
        finally:
            process.kill()


def test_after_a_refusal_it_goes_on_where_it_was(
    broker: OneBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [b"line %d" % number for number in range(10)]
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    store = broker.store
    refuse = lambda command: command.reply(13, "illegal") if len(broker.sends) == 6 else store(command)  # noqa: E731
    monkeypatch.setattr(broker, "store", refuse)
    words = ["--file", str(tmp_path / "lines"), "--in-flight", "1"]
    assert produce(broker, *words) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "resume with --skip 5; up to 1 of the next messages may already be stored" in said
    broker.sends.clear()
    monkeypatch.undo()
    assert produce(broker, *words, "--skip", "5") == 0
    assert broker.bodies() == lines[5:]
    assert "--skip" not in capsys.readouterr().err


def test_after_ctrl_c_it_says_where_to_go_on(broker: OneBroker) -> None:
    command = [sys.executable, "-m", "ha.cli", "produce", "T", "--servers", broker.name_server]
    words = ["--size", "11", "--count", "100000000", "--skip", "1000", "--in-flight", "4"]
    with subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True) as process:
        eventually("some are sent", lambda: len(broker.sends) > 100)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    found = re.search(r"resume with --skip (\d+)(?:; up to (\d+) of the next messages)?", said)
    assert found, said
    first, open_ = int(found[1]), int(found[2] or 0)
    sent = sorted(int(body[:10]) for body in broker.bodies())
    assert sent[: first - 1000] == list(range(1000, first))
    assert sent[-1] < first + open_


def test_made_up_messages(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert produce(broker, "--count", "500", "--size", "100") == 0
    assert [len(body) for body in broker.bodies()] == [100] * 500
    assert len(set(broker.bodies())) == 500
    assert set(Counter(c.ext_fields["e"] for c in broker.sends).values()) == {125}
    assert "500 SEND_OK" in capsys.readouterr().err


def test_results_as_json_lines(broker: OneBroker, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert produce(broker, "--body", "x", "--count", "3", "--json") == 0
    results = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [result["status"] for result in results] == ["SEND_OK"] * 3
    assert {result["queue"]["topic"] for result in results} == {"T"}


def test_a_weaker_status_is_an_exit_code_of_its_own(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.send_code, broker.send_remark = 11, "no slave is connected"
    assert produce(broker, "--body", "x") == 3
    assert "SLAVE_NOT_AVAILABLE" in (out := capsys.readouterr().out)
    assert "no slave is connected" in out
    assert produce(broker, "--body", "x", "--count", "5") == 3
    assert "5 SLAVE_NOT_AVAILABLE" in (err := capsys.readouterr().err)
    assert "no slave is connected" in err


def test_a_refusal_names_code_and_remark(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.send_code, broker.send_remark = 13, "the message is illegal"
    assert produce(broker, "--body", "x") == 1
    assert "answered 13: the message is illegal" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["produce", "T", "--body", "x", "--servers", "127.0.0.1:1"]) == 69
    err = capsys.readouterr().err
    assert "127.0.0.1:1" in err
    assert "refused" in err.lower()
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["produce"], "TOPIC"),
        (["produce", "T", "--body", "x", "--size", "3"], "one of"),
        (["produce", "T", "--size", "0"], "at least 1"),
        (["produce", "T", "--body", "x", "--count", "0"], "at least 1"),
        (["produce", "T", "--file", __file__, "--count", "1"], "--count requires --body or --size"),
        (["produce", "T", "--stdin", "--count", "1"], "--count requires --body or --size"),
        (["produce", "T", "--body", "x", "--count", "many"], "count"),
        (["produce", "T", "--body", "x", "--timeout", "0"], "--timeout must be greater than 0"),
        (["produce", "T", "--body", "x", "--servers", "nowhere"], "host:port"),
        (["produce", "T", "--body", "x", "--bodi", "y"], "bodi"),
        (["prodduce", "T"], "prodduce"),
    ],
)
def test_usage_errors(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_an_empty_body_is_a_usage_error(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert produce(broker, "--body", "") == 2
    assert "0 bytes" in capsys.readouterr().err


def test_a_tag_that_no_message_can_have_is_a_usage_error(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in ("a\x02b", "\udcff"):
        assert produce(broker, "--body", "x", "--tag", tag) == 2
        assert capsys.readouterr().err.startswith("ha: ")


def test_a_group_that_is_not_utf_8_is_a_usage_error(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Python has such bytes of the command line as lone surrogates."""
    assert produce(broker, "--body", "x", "--group", "g\udcff") == 2
    assert capsys.readouterr().err == "ha: an argument of the command is not UTF-8 text\n"


def test_a_file_that_can_t_be_sent(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert produce(broker, "--file", "/no/such/file") == 2
    assert "--file /no/such/file: no such file" in capsys.readouterr().err
    assert produce(broker, "--file", "/dev/null") == 2  # as with --file <(zcat lines.gz)
    assert "--file /dev/null: not a regular file; use --stdin" in capsys.readouterr().err
