"""HTML pages: self-contained, safe with any content of a log, and with the same figures as the result."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pyarrow.csv
import pyarrow.parquet as pq

from ha.spark.jobs.audit.job import AuditOptions, audit_with
from ha.spark.jobs.audit.report import audit_html, write_audit
from ha.spark.jobs.report import number, size
from ha.spark.jobs.stats.job import StatsOptions, stats_with
from ha.spark.jobs.stats.report import stats_html, write_stats
from tests.spark.inline import inline_runner
from tests.spark.stores import make_store, message
from tests.spark.test_audit import Golden, body_byte, entries_swapped, filler_padding

_VOID = {"meta", "br"}


class Page(HTMLParser):
    """Balanced tags, the text, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.names: set[str] = set()
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag not in _VOID:
            self.open.append(tag)
        self._look(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self._look(attrs)

    def _look(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.fetched.append(value)
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(html: str) -> Page:
    page = Page(html)
    assert page.fetched == []
    assert not re.search(r"@import|url\((?!#)", html)
    assert "script" not in page.names
    assert "prefers-color-scheme: dark" in html
    assert len(page.ids) == len(set(page.ids))
    for reference in re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', html):
        assert reference in page.ids
    return page


def test_an_audits_page_and_json_say_what_was_found(tmp_path: Path) -> None:
    golden = Golden("5.5.0", tmp_path)
    for damage in (body_byte, entries_swapped, filler_padding):
        damage(golden)
    result = golden.audit()
    write_audit(result, tmp_path / "audit.html", tmp_path / "audit.json")
    page = check((tmp_path / "audit.html").read_text())
    assert "Not clean: 4 findings" in page.text
    assert "svg" in page.names
    assert "var(--ink)" in (tmp_path / "audit.html").read_text()
    for finding in result.findings:
        assert number(finding.physical_offset) in page.text
    told = json.loads((tmp_path / "audit.json").read_text())
    assert told["exit_code"] == 1
    assert told["found"] == {
        "crc": {"slave": 1},
        "different": {"slave": 1},
        "entry_wrong": {"slave": 2},
        "padding": {"slave": 1},
    }
    assert {(f["kind"], f["physical_offset"]) for f in told["findings"]} == {
        (f.kind, f.physical_offset) for f in result.findings
    }
    assert told["kinds"].keys() >= told["found"].keys()


def test_page_of_a_clean_audit(tmp_path: Path) -> None:
    golden = Golden("4.9.7", tmp_path)
    page = check(audit_html(golden.audit()))
    assert "Clean" in page.text
    assert "Findings in full" not in page.text
    alone = check(audit_html(golden.audit(4096, golden.master)))
    assert "checked individually" in alone.text


def test_damaged_store_time_does_not_break_the_page(tmp_path: Path) -> None:
    golden = Golden("5.5.0", tmp_path)
    for record, time in ((golden.records[3], b"\x7f" * 8), (golden.records[9], b"\x80" + b"\0" * 7)):
        golden.patch(golden.slave, record["offset"] + 56, time)
    result = golden.audit(4096, golden.slave)
    check(audit_html(result))
    assert result.found.keys() == {"time_backwards"}


def test_the_figures_of_a_log_are_saved_as_table_plots_and_page(tmp_path: Path) -> None:
    evil = "</svg><script>alert(1)</script>&$x^2$\u65e5\x07"
    messages = [message(n, topic="__$t$", TAGS=evil, KEYS=f"<b>k{n % 3}</b>") for n in range(50)]
    store = make_store(tmp_path / "store", messages)
    result = stats_with(inline_runner(), StatsOptions(path=str(store)))
    written = write_stats(result, tmp_path / "out")
    assert {path.name for path in written} == {path.name for path in (tmp_path / "out").iterdir()}
    pictures = [path for path in written if path.suffix == ".png"]
    assert {path.stem for path in pictures} >= {"messages", "written", "latency", "sizes", "topics", "tags", "keys"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    page = check((tmp_path / "out" / "stats.html").read_text())
    assert evil in page.text
    table = pq.read_table(tmp_path / "out" / "stats.parquet")
    assert table.column("messages").to_pylist() == [row.figures.messages for row in result.rows]
    assert table.column("queue_id").to_pylist() == [0, 1, 2, 3]
    assert pyarrow.csv.read_csv(tmp_path / "out" / "stats.csv").column("messages").to_pylist() == [13, 13, 12, 12]
    told = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert told["total"]["messages"] == 50
    assert told["tags"][0]["value"] == evil


def test_an_empty_log_has_a_page_too(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [])
    result = stats_with(inline_runner(), StatsOptions(path=str(store)))
    assert "no message" in check(stats_html(result)).text
    assert len(write_stats(result, tmp_path / "out")) == 4
    audit = audit_with(inline_runner(), AuditOptions(paths=(str(store), str(store))))
    assert audit.exit_code == 4
    assert "Nothing could be compared" in check(audit_html(audit)).text


def test_numbers_are_readable() -> None:
    assert [number(value) for value in (None, 0, 1234567, 0.12345, 12345.6)] == [
        "–",
        "0",
        "1\u202f234\u202f567",
        "0.1235",
        "12\u202f346",
    ]
    assert [size(value) for value in (None, 10, 1536, 300 * 2**20, 2**50)] == [
        "–",
        "10\u202fB",
        "1.5\u202fKiB",
        "300\u202fMiB",
        "1.0\u202fPiB",
    ]


def test_results_are_plain_data(tmp_path: Path) -> None:
    golden = Golden("5.5.0", tmp_path)
    body_byte(golden)
    result = golden.audit()
    assert msgspec.convert(msgspec.to_builtins(result), type(result)) == result
