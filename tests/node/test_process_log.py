"""What a process keeps out of its log."""

import logging

import pytest

from ha import process


def test_an_accept_without_a_descriptor_is_said_every_ten_seconds_without_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """trio.serve_listeners tries again ten times a second and logs each time, traceback and all."""
    now_s = 1000.0
    monkeypatch.setattr("ha.process.time.monotonic", lambda: now_s)
    sparing = process._AcceptErrorFilter()
    said = []
    for _ in range(250):
        failed = OSError(24, "Too many open files")
        record = logging.LogRecord("trio", logging.ERROR, "", 0, "no", (), (OSError, failed, None))
        if sparing.filter(record):
            assert record.exc_info is None
            said.append(now_s)
        now_s += 0.1
    assert said == pytest.approx([1000, 1010, 1020])
