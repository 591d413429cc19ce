"""The corpus: inputs that fuzzing found in addition to the seeds, one file per target, and all former findings.

A corpus file has one input per line in base64, smallest first: a few files instead of thousands, with readable diffs.
`scripts/fuzz --keep` writes them.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.regressions import REGRESSIONS

FOLDER = Path(__file__).parent / "corpus"


def load(target: str) -> list[bytes]:
    """Return the corpus of a target."""
    path = FOLDER / f"{target}.txt"
    return [b64decode(line, validate=True) for line in path.read_text().split()] if path.exists() else []


def save(target: str, inputs: Iterable[bytes]) -> None:
    """Replace the corpus of a target."""
    lines = [b64encode(data).decode() + "\n" for data in sorted(set(inputs), key=lambda data: (len(data), data))]
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{target}.txt"
    path.write_text("".join(lines))
    if not lines:
        path.unlink()


def regressions(target: str) -> list[bytes]:
    """Return the former findings of a target."""
    return [data for name, _, data in REGRESSIONS if name == target]
