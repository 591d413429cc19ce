"""Compares halog with other message brokers, measures how it scales, and shows the results.

`run` and `growth` measure and add their results to a file. `table`, `aims` and `plot` show the results in a file.
bench/README.md explains the measurements.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench import aims
from bench.cases import CASES, Case, Tools
from bench.clients import JavaClient, output_of
from bench.growth import GROWTH
from bench.measure import machine
from bench.plot import plot
from bench.rounds import File, plan, run_blocks
from bench.sides import Halog, Loopback, Peer, RocketMQ, Side, Terms, install, peers_directory
from bench.table import markdown

ROCKETMQ = ("rocketmq-4.9.7", "rocketmq-5.5.0")
PEERS = (*ROCKETMQ, "kafka", "nats", "redis", "postgres", "iperf3")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, cases, text in (
        ("run", CASES, "Measure halog and its peers (RocketMQ, Kafka, NATS, Redis, PostgreSQL), and print tables."),
        (
            "growth",
            GROWTH,
            "Measure halog alone, with growing numbers of queues, connections, slaves and broker groups.",
        ),
    ):
        _add_run(commands.add_parser(name, help=text), cases)
    for name, text in (
        ("table", "Print the results as Markdown tables."),
        ("aims", "List the performance targets, and whether the results meet them."),
        ("plot", "Draw the results as curves, into PNG files."),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", type=Path, help="Result file of run or growth.")
        command.add_argument(
            "--others",
            type=float,
            metavar="CORES",
            help="Ignore runs during which other programs used more processor cores than this.",
        )
        if name == "plot":
            command.add_argument(
                "--out", type=Path, help="Directory for the PNG files (default: the file's name without its extension)."
            )
    options = parser.parse_args(words)
    if options.command in ("run", "growth"):
        options.peers = chosen(parser, "--peers", options.peers, PEERS, rocketmq=ROCKETMQ, postgresql=("postgres",))
        names = chosen(parser, "--cases", options.cases, tuple(case.name for case in options.known))
        options.cases = [case for case in options.known if case.name in names]
    return options


def _add_run(run: argparse.ArgumentParser, cases: Sequence[Case]) -> None:
    """Adds the options of `run` and `growth`; `known` are the cases to choose from."""
    run.set_defaults(known=cases)
    run.add_argument(
        "--cases",
        default="all",
        help=f"Comma-separated cases, or all (default): {', '.join(case.name for case in cases)}.",
    )
    if cases is CASES:
        words = f"Comma-separated peers, none, or all (default): rocketmq (both releases), {', '.join(PEERS)}."
        run.add_argument("--peers", default="all", help=words)
    else:
        run.set_defaults(peers="none")
    run.add_argument(
        "--out",
        type=Path,
        required=True,
        help="Result file (JSON lines). Existing results are kept and included in the tables.",
    )
    run.add_argument("--rounds", type=int, default=5, help="Number of runs of each case (default: %(default)s).")
    terms = Terms()
    run.add_argument(
        "--seconds",
        type=float,
        default=terms.seconds,
        help="Approximate duration of a run, in seconds (default: %(default)g).",
    )
    run.add_argument(
        "--warm",
        type=float,
        default=terms.warm_s,
        help="Warm-up time of each server, in seconds (default: %(default)g).",
    )
    run.add_argument(
        "--size",
        type=int,
        default=terms.size,
        help="Size of halog's message bodies in bytes; peers always use 1,024 (default: %(default)s).",
    )
    run.add_argument(
        "--mib",
        type=int,
        default=terms.log_mib,
        help="Size of the log for catch-up, consumption and starts, in MiB (default: %(default)s).",
    )
    run.add_argument(
        "--no-ballast",
        action="store_true",
        help="Don't fill the free memory before the runs (see Memory in bench/README.md).",
    )
    run.add_argument(
        "--java-client",
        default=terms.java_client,
        help="Release of RocketMQ's client, which is used for all brokers (default: %(default)s).",
    )
    run.add_argument(
        "--peers-directory",
        type=Path,
        default=peers_directory(),
        help="Directory with the scripts of each peer, NAME/setup.sh and so on (default: $HALOG_BENCH_PEERS, or"
        " shared/bench next to the repository).",
    )
    run.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()) / "halog-bench",
        help="Directory for installed peers, which are kept, and for stores (default: %(default)s).",
    )


def chosen(
    parser: argparse.ArgumentParser, flag: str, words: str, known: tuple[str, ...], **groups: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the names of a comma-separated list, in the order of `known`. Exits with 2 for an unknown name."""
    groups = {"all": known, "none": (), **groups}
    wanted = [name for word in words.split(",") for name in groups.get(word, (word,))]
    unknown = set(wanted) - set(known)
    if unknown:
        parser.error(f"{flag}: unknown {', '.join(sorted(unknown))}; choose from {', '.join([*groups, *known])}")
    return tuple(name for name in known if name in wanted)


def sides_of(names: Sequence[str], terms: Terms, directory: Path, scripts: Path) -> list[Side]:
    """Returns halog and the peers with these names."""
    found: list[Side] = [Halog(terms, directory)]
    for name in names:
        if name in ROCKETMQ:
            found.append(RocketMQ(terms, directory, scripts / "rocketmq", name.partition("-")[2]))
        elif name == "iperf3":
            found.append(Loopback())
        else:
            found.append(Peer(name, terms, directory, scripts / name))
    return found


def measure(options: argparse.Namespace) -> None:
    """Runs the blocks that the file lacks, appends their results to it, and prints its tables."""
    terms = Terms(options.seconds, options.warm, options.size, options.mib, options.java_client, not options.no_ballast)
    file = File(options.out)
    file.check(terms)
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    scripts = options.peers_directory.resolve() / "peers"
    sides = sides_of(options.peers, terms, directory, scripts)
    blocks = list(plan(options.cases, sides, options.rounds))
    ballast = directory / "ballast"
    java = no_java = None
    versions: dict[str, str] = {}
    if any(block.case.needs_java for block in blocks):
        installed = install(scripts / "rocketmq", directory / "rocketmq", terms.java_client)
        java = JavaClient(scripts / "rocketmq", directory / "rocketmq", terms.java_client)
        no_java = installed.why_not and f"no Java client: {installed.why_not}"
        if no_java is None:
            versions["java"] = output_of(["java", "-version"]).splitlines()[0]
    for side in sides:
        if side.missing() is None and side.version:
            versions[side.name] = side.version
    about = {"terms": msgspec.to_builtins(terms), "machine": machine(), "versions": versions}
    file.append([{"kind": "about", **about, "command": shlex.join(["bench/run", *sys.argv[1:]])}])
    try:
        run_blocks(blocks, Tools(terms, java), file, ballast, no_java)
    finally:
        ballast.unlink(missing_ok=True)
        for side in sides:
            side.drop_log()
    print(markdown(file.lines()))


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    if options.command in ("run", "growth"):
        # Servers that outlive the benchmark would keep their ports: exit through the code that stops them.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        measure(options)
        return
    lines = File(options.file).lines()
    if options.others is not None:
        lines = [line for line in lines if line.get("foreign_cores", 0) <= options.others]
    if options.command == "table":
        print(markdown(lines))
    elif options.command == "aims":
        print(aims.markdown(lines))
    else:
        for path in plot(lines, options.out or options.file.with_suffix("")):
            print(path)


if __name__ == "__main__":
    main()
