"""docs/errors.md names every exception and status of the SDK, and states its figures."""

import re
from enum import Enum

from ha import client
from ha.client import backoff, recalling, sender
from ha.protocol.codes import ResponseCode
from tests.docs.pages import DOCS

TEXT = (DOCS / "errors.md").read_text()


def public(base: type) -> list[type]:
    return [
        each for name in client.__all__ if isinstance(each := getattr(client, name), type) and issubclass(each, base)
    ]


def test_every_exception_of_the_sdk_is_explained() -> None:
    found = public(Exception)
    assert len(found) > 10
    assert [kind.__name__ for kind in found if f"`{kind.__name__}`" not in TEXT] == []


def test_the_table_has_every_exception_that_is_not_a_base() -> None:
    section = TEXT.partition("\n## Exceptions")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert {*rows, "HalogError", "ClientError"} == {kind.__name__ for kind in public(Exception)}


def test_every_status_is_explained() -> None:
    section = TEXT.partition("\n## Statuses")[2]
    for kind in (client.SendStatus, client.PullStatus, client.TransactionState):
        assert f"`{kind.__name__}`" in section
        assert [each.name for each in kind if f"`{each.name}`" not in section] == []
    endings = ("Status", "State")
    assert {kind.__name__ for kind in public(Enum) if kind.__name__.endswith(endings)} == {
        *("SendStatus", "PullStatus", "TransactionState")
    }


def test_figures_are_those_of_the_code() -> None:
    options, push = client.ClientOptions(), client.PushOptions()
    for figure in (
        f"pause: {backoff.PAUSE_S_FIRST:g} s, doubled each time up to {backoff.PAUSE_S_MAX:g} s",
        f"`send_timeout_s` ({options.send_timeout_s:g} s)",
        f"`send_retries` times ({options.send_retries})",
        f"`request_timeout_s` ({options.request_timeout_s:g} s)",
        f"`pull_pause_s` ({push.pull_pause_s:g} s)",
        f"repeated every {recalling._RETRY_PAUSE_S:g} s",
    ):
        assert figure in " ".join(TEXT.split())
    assert backoff.JITTER_SHARE == 0.5


def test_retried_codes_are_those_of_the_code() -> None:
    [retried] = re.findall(r"not ready for the topic: `BrokerError` with code ([\d, or]+)", TEXT)
    assert {int(code) for code in re.findall(r"\d+", retried)} | {14} == {code.value for code in sender.RETRYABLE_CODES}
    assert {ResponseCode.SERVICE_NOT_AVAILABLE} == sender._UNTIL_TIMEOUT
    [recalled] = re.findall(r"`recall` is repeated .+ answers (.+)\.", TEXT)
    assert {int(code) for code in re.findall(r"\d+", recalled)} == {code.value for code in recalling._RETRYABLE_CODES}
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", TEXT, re.MULTILINE)
    assert len(rows) > 10
    assert all(ResponseCode(int(code)).name == name for code, name in rows)
