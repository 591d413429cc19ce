"""python -m bench run|growth|table|aims|plot: measures halog and its peers, halog as it grows, and prints the tables,
targets and curves of a result file. See README.md.
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
    parser = argparse.ArgumentParser(prog="bench/run", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, cases, text in (
        ("run", CASES, "halog beside its peers: measure, append to a file, print its tables"),
        ("growth", GROWTH, "the same of halog alone as it grows"),
    ):
        _add_run(commands.add_parser(name, help=text), cases)
    for name, text in (
        ("table", "the Markdown tables of a file"),
        ("aims", "what halog wants to reach beside peers, and whether a file's figures do"),
        ("plot", "the curves of a file, as PNG"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", type=Path)
        command.add_argument(
            "--others",
            type=float,
            metavar="CORES",
            help="leave out runs during which other programs used more cores than this",
        )
        if name == "plot":
            command.add_argument("--out", type=Path, help="directory (default: the file's name without its extension)")
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
        "--cases", default="all", help=f"all, or a comma-separated list of {', '.join(case.name for case in cases)}"
    )
    if cases is CASES:
        words = f"all, none, or a comma-separated list of rocketmq (both), {', '.join(PEERS)}"
        run.add_argument("--peers", default="all", help=words)
    else:
        run.set_defaults(peers="none")
    run.add_argument("--out", type=Path, required=True, help="file of JSON lines; existing results are kept and count")
    run.add_argument("--rounds", type=int, default=5)
    terms = Terms()
    run.add_argument("--seconds", type=float, default=terms.seconds, help="approximate duration of each run")
    run.add_argument("--warm", type=float, default=terms.warm_s, help="warm-up time of servers in seconds")
    run.add_argument("--size", type=int, default=terms.size, help="bytes per message body; peers always use 1,024")
    run.add_argument(
        "--mib", type=int, default=terms.log_mib, help="size of the log for catch-up, consumption and starts"
    )
    run.add_argument("--no-ballast", action="store_true", help="don't fill free memory first (README.md, Memory)")
    run.add_argument("--java-client", default=terms.java_client, help="RocketMQ release of the client for all brokers")
    run.add_argument(
        "--peers-directory",
        type=Path,
        default=peers_directory(),
        help="directory with peers/NAME/setup.sh, start.sh, … (default: $HALOG_BENCH_PEERS, or shared/bench next to"
        " the repository)",
    )
    run.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()) / "halog-bench",
        help="installed peers, which are kept, and stores (default: halog-bench in the temporary directory)",
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
