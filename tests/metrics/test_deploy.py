"""What is in deploy/ for Prometheus and Grafana names only metrics, labels and values of labels that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ha.admin.metrics import METRICS
from ha.broker.options import BrokerRole
from ha.failover.member_state import MemberState
from ha.replication.progress import SlaveState
from ha.replication.statistics import Condition
from ha.spark.jobs.archive.options import ArchiveResult
from ha.spark.jobs.archive.progress import ArchiveLag
from ha.spark.jobs.archive.progress import prometheus_text as archive_metrics
from ha.spark.source.listener import LagReport, QueueLag
from ha.spark.source.listener import prometheus_text as stream_metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_SCRAPES = {"up": {"job", "instance"}}
"""What Prometheus itself makes."""
TARGET = {"job", "instance"}
VALUES = {
    "role": {role.value for role in BrokerRole},
    "state": {state.value for state in (*SlaveState, *MemberState)},
    "condition": {condition.value for condition in Condition},
}
WORDS = {"and", "or", "unless", "on", "by", "ignoring", "without", "group_left", "group_right", "bool", "offset"}


def known() -> dict[str, set[str]]:
    """Names as they are in expressions -> labels."""
    names = {name: set(labels) for name, labels in OF_SCRAPES.items()}
    for metric in METRICS:
        labels = {*metric.labels, *TARGET}
        if metric.kind == "histogram":
            names |= {f"{metric.name}_sum": labels, f"{metric.name}_count": labels}
            names[f"{metric.name}_bucket"] = labels | {"le"}
        else:
            names[metric.name] = labels
    for name, labels in re.findall(r"^(halog_\w+)\{(.*)\} ", of_spark(), re.MULTILINE):
        names[name] = {*re.findall(r'(\w+)="', labels), *TARGET}
    return names


def of_spark() -> str:
    """The files that a stream's listener and an archiver write."""
    queue = QueueLag(
        topic="t",
        broker="b",
        queue_id=0,
        next_offset=0,
        end_offset=1,
        messages=1,
        bytes=1,
        seconds=1.0,
        headroom=0,
        lost=0,
    )
    report = LagReport(query="q", query_id="i", batch_id=0, measured_at_ms=0, queues=(queue,))
    lag = ArchiveLag(bytes=0, seconds=0.0, headroom_bytes=0)
    return stream_metrics([report]) + archive_metrics(lag, ArchiveResult(archive="a", broker_name="b"), 0)


KNOWN = known()


def faults(expression: str) -> list[str]:
    """What an expression names that there isn't."""
    found = []
    used: set[str] = set()
    for name, matchers in re.findall(r"([a-zA-Z_]\w*)\s*\{([^}]*)\}", expression):
        for label, _, value in re.findall(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"', matchers):
            if label not in KNOWN.get(name, set()):
                found.append(f"{name} has no label {label}")
            if label in VALUES and value not in VALUES[label]:
                found.append(f"{label} is never {value}")
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", expression)
    grouped = {
        label
        for labels in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", plain)
        for label in re.split(r"[,\s]+", labels.strip())
    }
    plain = re.sub(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)", " ", plain)
    for word in re.findall(r"(?<![\w.$])([a-zA-Z_]\w*)(?!\w)(?!\s*\()", plain):
        if word in WORDS:
            continue
        used.add(word)
        if word not in KNOWN:
            found.append(f"there is no {word}")
    labels = set().union(*(KNOWN.get(name, set()) for name in used))
    found += [f"nothing there has the label {label}" for label in sorted(grouped - labels)]
    return found if used else [*found, "it names no metric"]


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def targets(board: str) -> Iterator[tuple[str, str, str]]:
    """Panel, expression, legend."""
    dashboard = json.loads((DEPLOY / "grafana" / board).read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_alert_names_what_there_is_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert faults(rule["expr"]) == []
    assert rule["labels"]["severity"] in {"warning", "critical"}
    texts = rule["annotations"]
    assert texts["summary"]
    assert len(texts["description"]) > 60
    labels = set(re.findall(r"\$labels\.(\w+)", texts["summary"] + texts["description"]))
    there = set().union(*(KNOWN[name] for name in KNOWN if re.search(rf"\b{name}\b", rule["expr"])))
    assert labels <= there


@pytest.mark.parametrize(("board", "count"), [("halog.json", 40), ("halog-spark.json", 13)])
def test_each_panel_names_what_there_is(board: str, count: int) -> None:
    panels = list(targets(board))
    assert len(panels) >= count
    for title, expression, legend in panels:
        assert faults(expression) == [], title
        labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
        there = set().union(*(KNOWN[name] for name in KNOWN if re.search(rf"\b{name}\b", expression)))
        assert labels <= there, title


def test_the_board_of_spark_shows_every_figure() -> None:
    text = " ".join(expression for _, expression, _ in targets("halog-spark.json"))
    assert set(re.findall(r"halog_\w+", text)) == set(re.findall(r"^(halog_\w+)\{", of_spark(), re.MULTILINE))


def test_alerts_and_panels_together_use_every_histogram() -> None:
    text = "".join(expression for _, expression, _ in targets("halog.json"))
    for metric in METRICS:
        assert metric.kind != "histogram" or f"{metric.name}_bucket" in text


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("halog_redy == 0", "there is no halog_redy"),
        ('halog_role{rolle="SLAVE"}', "halog_role has no label rolle"),
        ('halog_role{role="SALVE"}', "role is never SALVE"),
        ("sum by (slaev) (halog_slave_lag_bytes)", "nothing there has the label slaev"),
        ("rate(halog_append_seconds[5m])", "there is no halog_append_seconds"),
        ("vector(1)", "it names no metric"),
    ],
)
def test_mistakes_are_seen(expression: str, fault: str) -> None:
    assert faults(expression) == [fault]
