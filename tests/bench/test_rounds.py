"""The order of runs, resuming a file, medians and ratios, missing peers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.__main__ import arguments, main, sides_of
from bench.cases import CASES, RATE, Case, Metric, Tools
from bench.clients import RunError
from bench.growth import GROWTH
from bench.measure import hold_memory
from bench.rounds import File, plan, run_blocks
from bench.sides import Brokers, Loopback, Run, Servers, Side, Terms
from bench.table import markdown, ratios
from scripts.nodes import cluster

TERMS = Terms(seconds=1, ballast=False)


class Fake(Brokers):
    """A side without servers."""

    def __init__(self, name: str, why_not: str | None = None) -> None:
        self.name = name
        self.why_not = why_not

    def missing(self) -> str | None:
        return self.why_not

    def replicated(self, flush: str = "ASYNC_FLUSH") -> None: ...

    def name_server(self, connection_count: int) -> None: ...

    def filled(self) -> None: ...

    def fresh_slave(self, servers: Servers) -> None: ...

    def restart(self, servers: Servers, *, kill: bool) -> float:
        raise NotImplementedError


class Asked:
    """A case that records its blocks."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.breaks_at: int | None = None
        self.case = Case("sends", "How fast", "in flight", (RATE, Metric("p99_ms", "p99 ms", 1)), self.block)

    def block(self, tools: Tools, side: Brokers) -> Iterator[Run]:
        self.blocks.append(side.name)
        rate = (300.0 if side.name == "halog" else 100.0) + len(self.blocks)
        yield Run(1, side.name, {"rate": rate, "p99_ms": 2.0, "foreign_cores": 0.25})
        if len(self.blocks) == self.breaks_at:
            raise RunError("it fell over")
        yield Run(16, side.name, {"rate": 2 * rate, "p99_ms": 4.0, "foreign_cores": 0.0})


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "runs.jsonl")


def measure(asked: Asked, file: File, rounds: int, *sides: Side) -> None:
    run_blocks(list(plan([asked.case], sides, rounds)), Tools(TERMS), file, file.path.with_name("ballast"))


def test_interrupted_file_is_resumed(asked: Asked, file: File) -> None:
    sides = Fake("halog"), Fake("theirs")
    asked.breaks_at = 4
    measure(asked, file, 2, *sides)
    assert [line["kind"] for line in file.lines()] == ["run"] * 6 + ["failed"]
    with file.path.open("a") as cut:
        cut.write('{"kind": "run", "rou')
    measure(asked, file, 3, *sides)
    # Round 1 of the peer had failed and is repeated, then round 2 of both runs.
    assert asked.blocks[4:] == ["theirs", "halog", "theirs"]
    assert sum(line["kind"] == "run" for line in file.lines()) == 12


def test_file_with_other_terms_is_rejected(file: File) -> None:
    about = {"kind": "about", "terms": {"seconds": 8.0}}
    file.path.write_text(json.dumps(about) + "\n")
    with pytest.raises(SystemExit, match="contains results with"):
        file.check(TERMS)


def test_missing_peer_is_reported_and_skipped(asked: Asked, file: File, capsys: pytest.CaptureFixture[str]) -> None:
    measure(asked, file, 2, Fake("halog"), Fake("theirs", "there is no javac"))
    assert asked.blocks == ["halog", "halog"]
    assert capsys.readouterr().err.count("theirs skipped: there is no javac") == 1
    assert "theirs: skipped, there is no javac" in markdown(file.lines())


def test_reasons_for_missing_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    ours, *peers = sides_of(("rocketmq-4.9.7", "kafka"), TERMS, tmp_path, tmp_path / "peers")
    assert ours.missing() is None
    assert [peer.missing() for peer in peers] == [
        "there is no rocketmq/setup.sh in the peers' directory",
        "there is no kafka/setup.sh in the peers' directory",
    ]
    (tmp_path / "kafka").mkdir()
    (tmp_path / "kafka" / "setup.sh").write_text("echo Maven is not there; exit 3\n")
    _, kafka = sides_of(("kafka",), TERMS, tmp_path, tmp_path)
    assert kafka.missing() == "bash setup.sh ended with 3: Maven is not there"


def test_two_processes_replace_iperf3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCH_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("bench.sides._STREAM_S", 0.1)
    [run] = Loopback().catch_up({})
    assert run.side == "two processes of Python"
    assert run.found["mb_per_s"] > 0


def test_sides_alternate_and_are_compared(asked: Asked, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.table.CASES", (asked.case,))
    measure(asked, file, 3, Fake("halog"), Fake("theirs"))
    assert asked.blocks == ["halog", "theirs"] * 3
    runs = file.lines()
    # halog's rates are 301, 303, 305, the peer's 102, 104, 106.
    assert ratios(runs, asked.case) == {
        (1, "theirs"): {"rate": 303 / 104, "p99_ms": 1.0},
        (16, "theirs"): {"rate": 606 / 208, "p99_ms": 1.0},
    }
    rows = [row for row in markdown(runs).splitlines() if row.startswith("|")]
    assert rows[0] == "| in flight | side | messages/s | p99 ms | rounds | others' cores |"
    assert rows[2:5] == [
        "| 1 | halog | 303 (301-305) | 2.0 (2.0-2.0) | 3 | 0.25 (0.25-0.25) |",
        "| 1 | theirs | 104 (102-106) | 2.0 (2.0-2.0) | 3 | 0.25 (0.25-0.25) |",
        "| 1 | halog / theirs | **2.91** | **1.00** |  |  |",
    ]


def test_runs_under_other_load_are_left_out(
    asked: Asked, file: File, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.table.CASES", (asked.case,))
    measure(asked, file, 1, Fake("halog"))
    main(["table", str(file.path), "--others", "0.25"])
    assert "| 1 | halog | 301 | 2.0 | 1 | 0.25 |" in capsys.readouterr().out
    main(["table", str(file.path), "--others", "0.2"])
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert rows[2:] == ["| 16 | halog | 602 | 4.0 | 1 | 0.00 |"]


def test_free_memory_is_filled_before_each_block_without_using_the_disk(
    asked: Asked, tmp_path: Path, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.measure._LEFT_FREE_BYTES", 1 << 62)
    ballast = tmp_path / "ballast"
    held: list[Path] = []
    monkeypatch.setattr("bench.rounds.hold_memory", held.append)
    blocks = list(plan([asked.case], [Fake("halog"), Fake("theirs")], 2))
    run_blocks(blocks, Tools(Terms(seconds=1), None), file, ballast)
    assert held == [ballast] * 4
    hold_memory(ballast)
    assert ballast.stat().st_size == 0  # less is free than must remain free
    monkeypatch.setattr("bench.measure._LEFT_FREE_BYTES", 0)
    read: list[int] = []
    monkeypatch.setattr("bench.measure.read_through", lambda path: read.append(path.stat().st_size))
    hold_memory(ballast)
    assert read[0] > 1 << 20
    assert ballast.stat().st_blocks == 0


def test_nodes_have_different_ports(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        for _ in range(7):
            nodes.add_slave()
    ports = [
        int(line.partition("=")[2])
        for conf in tmp_path.glob("*.conf")
        for line in conf.read_text().splitlines()
        if "istenPort=" in line
    ]
    assert len(ports) == len(set(ports)) == 27
    assert not {port - 2 for port in ports} & set(ports)  # RocketMQ's fast port


def test_cases_run_only_on_suitable_sides(tmp_path: Path) -> None:
    sides = sides_of(("rocketmq-4.9.7", "kafka", "redis", "iperf3"), TERMS, tmp_path, tmp_path)
    asked = {case.name: [side.name for side in sides if case.asks(side)] for case in CASES}
    assert asked["sends"] == asked["starting"] == ["halog", "rocketmq-4.9.7"]
    assert asked["sdk"] == ["halog", "kafka"]
    assert asked["connections"] == ["halog", "redis"]
    assert asked["catchup"] == ["halog", "rocketmq-4.9.7", "kafka", "redis", "iperf3"]


def test_arguments() -> None:
    options = arguments(["run", "--out", "f", "--peers", "kafka,rocketmq", "--cases", "load,sends"])
    assert options.peers == ("rocketmq-4.9.7", "rocketmq-5.5.0", "kafka")
    assert [case.name for case in options.cases] == ["sends", "load"]
    assert arguments(["run", "--out", "f", "--peers", "postgresql"]).peers == ("postgres",)
    assert [case.name for case in arguments(["growth", "--out", "f"]).cases] == [case.name for case in GROWTH]
    defaults = arguments(["run", "--out", "f", "--peers", "none"])
    assert (defaults.peers, defaults.rounds) == ((), 5)
    with pytest.raises(SystemExit):
        arguments(["run", "--out", "f", "--peers", "activemq"])


def test_curves_are_plotted(tmp_path: Path) -> None:
    file = File(tmp_path / "runs.jsonl")
    head = {"kind": "run", "round": 0, "peer": "halog", "side": "halog"}
    file.append(
        [
            *({**head, "case": "sends", "point": n, "rate": 9.0 * n, "p50_ms": 1.0, "p99_ms": 2.0} for n in (1, 16)),
            {**head, "case": "catchup", "point": "fresh slave", "mb_per_s": 9.0, "curve": [[0.0, 0], [0.1, 900]]},
        ]
    )
    main(["plot", str(file.path), "--out", str(tmp_path / "curves")])
    assert sorted(path.name for path in (tmp_path / "curves").iterdir()) == ["catchup.png", "sends.png"]


def test_plots_require_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"halog\[spark\]"):
        main(["plot", str(tmp_path / "runs.jsonl")])


@pytest.mark.processes
def test_run_of_halog(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run of real processes."""
    monkeypatch.setenv("BENCH_LOCK", str(tmp_path / "lock"))  # does not wait for real benchmarks
    words = ["run", "--peers", "none", "--cases", "starting", "--rounds", "1", "--seconds", "0.1", "--warm", "0.1"]
    main([*words, "--mib", "1", "--no-ballast", "--directory", str(tmp_path), "--out", str(tmp_path / "runs.jsonl")])
    assert [line["kind"] for line in File(tmp_path / "runs.jsonl").lines()] == ["about", "run", "run", "run"]
    assert "after kill -9 | halog |" in capsys.readouterr().out
