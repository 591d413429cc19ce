"""Log lines go out in order, and nobody waits for who reads them."""

import fcntl
import json
import logging
import os
import select
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ha.json_log import JsonFormatter
from ha.log_lines import LINE_COUNT_MAX, LogLines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small one: (to read from, to write to)."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


def test_lines_are_written_as_they_are_logged(pipe: tuple[int, int]) -> None:
    lines = LogLines(pipe[1])
    handler = logging.StreamHandler(lines)
    for number in range(3):
        handler.emit(logging.LogRecord("a", logging.INFO, "", 0, "line=%s ü \udc80", (number,), None))
    lines.drain(10.0)
    assert os.read(pipe[0], 4096).decode() == "".join(f"line={number} ü \\udc80\n" for number in range(3))


def test_nobody_waits_for_a_pipe_that_is_not_read(pipe: tuple[int, int], request: pytest.FixtureRequest) -> None:
    """Neither who logs nor who drains; how much was too much is logged, as all else is, when somebody reads again."""
    lines = LogLines(pipe[1])
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter())
    logging.getLogger("ha.log_lines").addHandler(handler)
    request.addfinalizer(lambda: logging.getLogger("ha.log_lines").removeHandler(handler))
    count = LINE_COUNT_MAX + 1000
    for number in range(count):
        lines.write(f"line={number:06} {'.' * 100}\n")
    lines.drain(0.01)
    numbers: list[int] = []
    lost_count = 0
    with open(pipe[0], closefd=False) as reader:
        while len(numbers) + lost_count < count:
            line = reader.readline()
            if line.startswith("{"):
                told = json.loads(line)
                assert told["event"] == "process.log_lines_dropped"
                lost_count += told["count"]
            else:
                numbers.append(int(line[5:11]))
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= LINE_COUNT_MAX
    assert lost_count > 0


def test_a_pipe_that_another_process_has_made_non_blocking_gets_whole_lines(pipe: tuple[int, int]) -> None:
    """The mode belongs to the pipe, and the processes that share it do not all want the same."""
    os.set_blocking(pipe[1], False)
    lines = LogLines(pipe[1])
    expected = "".join(f"line={number:03} {'.' * 100}\n" for number in range(200)).encode()
    for line in expected.decode().splitlines(keepends=True):
        lines.write(line)
    lines.drain(0.1)
    received = b""
    while len(received) < len(expected):
        assert select.select([pipe[0]], [], [], 10.0)[0]
        received += os.read(pipe[0], 1000)
    assert received == expected


def test_a_reader_that_is_gone_ends_nothing(pipe: tuple[int, int]) -> None:
    lines = LogLines(pipe[1])
    os.close(pipe[0])
    lines.write("to nobody\n")
    lines.drain(10.0)
    pipe_again = os.pipe()
    os.dup2(pipe_again[1], pipe[1])
    lines.write("to somebody\n")
    lines.drain(10.0)
    assert os.read(pipe_again[0], 4096) == b"to somebody\n"
    for end in pipe_again:
        os.close(end)
