"""docs/observability.md: its commands, snippets and lists are true."""

import json
import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

from ha.admin.metrics import METRICS
from ha.json_log import JsonFormatter
from ha.node import open_node
from tests.docs.pages import DOCS, ROOT, blocks
from tests.metrics.nodes import ask, settings

PAGE = "observability.md"
TEXT = (DOCS / PAGE).read_text()
TOKEN = "sixteen letters!!"


@pytest.fixture
def levels_restored() -> Iterator[None]:
    yield
    logging.getLogger("ha.replication").setLevel(logging.NOTSET)


async def test_each_curl_answers(tmp_path: Path, levels_restored: None) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER", f"adminToken={TOKEN}")) as node:
        for line in "".join(blocks(PAGE)).splitlines():
            words = shlex.split(line.partition("|")[0].replace("$TOKEN", TOKEN))
            assert words[:2] == ["curl", "-s"]
            headers = [words[at + 1] for at, word in enumerate(words) if word == "-H"]
            method = words[words.index("-X") + 1] if "-X" in words else "GET"
            path = words[-1].removeprefix("http://127.0.0.1:10913")
            answer = await ask(
                node.admin_address, path, *(headers or [f"Authorization: Bearer {TOKEN}"]), method=method
            )
            assert answer[0] == 200, line
            if "grep" in line:
                assert re.search(rf"^{line.rpartition('grep ')[2]} 1.0$", answer[2], re.MULTILINE)
            else:
                json.loads(answer[2])
        assert logging.getLogger("ha.replication").level == logging.DEBUG


def test_the_list_of_metrics_is_where_it_says() -> None:
    [snippet] = blocks(PAGE, "python")
    with redirect_stdout(StringIO()) as said:
        exec(snippet, {})
    assert len(said.getvalue().splitlines()) == len(METRICS)


def test_the_scrape_configuration_is_one_with_our_rules() -> None:
    [snippet] = blocks(PAGE, "yaml")
    found = yaml.safe_load(snippet)
    assert found["scrape_configs"][0]["job_name"] == "halog"
    assert (ROOT / "deploy" / "prometheus" / found["rule_files"][0]).exists()


def test_the_line_of_json_is_what_its_event_is_logged_as() -> None:
    [snippet] = blocks(PAGE, "json")
    shown = json.loads(snippet)
    template = "put.not_ok status=%s cause=%s puts=%d remark=%r"
    assert f'"{template}"' in (ROOT / "ha" / "broker" / "explained.py").read_text()
    arguments = tuple(shown[key] for key in ("status", "cause", "puts", "remark"))
    record = logging.LogRecord("ha.broker.explained", logging.WARNING, "", 0, template, arguments, None)
    assert json.loads(JsonFormatter().format(record)) == shown | {
        "time": json.loads(JsonFormatter().format(record))["time"]
    }


def test_every_alert_is_listed() -> None:
    [group] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    assert re.findall(r"^\| `(Halog\w+)` \|", TEXT, re.MULTILINE) == [rule["alert"] for rule in group["rules"]]


def test_metrics_that_are_named_are_there() -> None:
    names = {metric.name for metric in METRICS}
    assert set(re.findall(r"\b(?:halog|process)_\w+", TEXT)) <= names
