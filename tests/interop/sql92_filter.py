"""RocketMQ's own filter, in a JVM without a broker; java/SqlFilterTable.java describes its input."""

import subprocess
from collections.abc import Iterable, Mapping, Sequence

from tests.interop.releases import Release

_JAVA = ("java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def _escaped(text: str) -> str:
    raw = text.encode("utf-16-be")
    return "".join(f"\\u{raw[i]:02x}{raw[i + 1]:02x}" for i in range(0, len(raw), 2))


def ask(release: Release, expressions: Iterable[str], properties: Sequence[Mapping[str, str]]) -> list[str]:
    """For each expression a letter for each set of properties: T, F, N (unknown), X (exception) or E."""
    lines = []
    rows = ["\t".join(["P", *(_escaped(part) for pair in each.items() for part in pair)]) for each in properties]
    for expression in expressions:
        lines.append(f"E\t{_escaped(expression)}")
        lines += rows
    done = subprocess.run(
        [*_JAVA, "-cp", release.client_class_path, "SqlFilterTable"],
        input="".join(f"{line}\n" for line in lines).encode(),
        capture_output=True,
        timeout=120,
        check=True,
    )
    letters = done.stdout.decode().split("\n")[:-1]
    width = len(rows)
    return ["".join(letters[at : at + width]) for at in range(0, len(letters), width)]


def verdicts(letters: str) -> str:
    """The part that a consumer notices: T, "-" and E."""
    return "".join(letter if letter in "TE" else "-" for letter in letters)
