"""Every seed, every kept input and every input that once was a finding, through its harness: no error, in bounded time
and memory. Also seeds with random changes, which the fuzzer's dictionary makes likely to be read far; and a target of
each module for a moment under the fuzzer itself; the others are long tests."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import corpus, registry
from tests.fuzz.harness import Harness, TooMuchMemoryError, TooSlowError, run_measured, run_timed
from tests.fuzz.regressions import REGRESSIONS

ROOT = Path(__file__).parents[2]
MEASURED_EACH = 10
CORPUS_SIZE_MAX = 1_000_000
FUZZ_RUNS = 60
FUZZ_S = 1
SEED_COUNT_MAX = 20


@functools.cache
def seeds_of(target: str) -> list[bytes]:
    return list(registry.load(target).seeds())


@pytest.mark.parametrize("target", registry.MODULES)
def test_known_inputs(target: str) -> None:
    harness = registry.load(target)
    inputs = [*seeds_of(target), *corpus.load(target)]
    for number, data in enumerate(inputs):
        run_timed(harness, data)
        if number % MEASURED_EACH == 0:
            run_measured(harness, data)


@pytest.mark.parametrize("target", registry.MODULES)
@settings(max_examples=60)
@given(data=st.data())
def test_changed_inputs(target: str, data: st.DataObject) -> None:
    harness = registry.load(target)
    changed = bytearray(data.draw(st.binary(max_size=100) | st.sampled_from(seeds_of(target))))
    words = st.binary(max_size=4) | (st.sampled_from(harness.words) if harness.words else st.nothing())
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(changed)))
        changed[at : at + data.draw(st.integers(0, 6))] = data.draw(words)
    run_timed(harness, bytes(changed))


@pytest.mark.parametrize(
    ("target", "data"), [pytest.param(target, data, id=f"{target}: {what}") for target, what, data in REGRESSIONS]
)
def test_former_findings(target: str, data: bytes) -> None:
    harness = registry.load(target)
    run_timed(harness, data)
    run_measured(harness, data)


def test_corpus_is_small_and_has_only_known_targets() -> None:
    files = list(corpus.FOLDER.glob("*"))
    assert {path.stem for path in files} <= registry.MODULES.keys()
    assert sum(path.stat().st_size for path in files) < CORPUS_SIZE_MAX


def test_excessive_time_or_memory_is_a_finding() -> None:
    def spin(data: bytes) -> None:
        sum(range(len(data) * 100_000))

    def hoard(data: bytes) -> None:
        bytearray(len(data) * 1_000_000)

    slow = Harness(run=spin, seeds=list, seconds_max=0.01)
    run_timed(slow, b"")
    with pytest.raises(TooSlowError):
        run_timed(slow, b"x" * 50)
    greedy = Harness(run=hoard, seeds=list, memory_max=10_000_000)
    run_measured(greedy, b"x" * 9)
    with pytest.raises(TooMuchMemoryError):
        run_measured(greedy, b"x" * 11)


_FIRST_OF_MODULES = {module: target for target, module in reversed(registry.MODULES.items())}


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=() if _FIRST_OF_MODULES[module] == target else pytest.mark.long)
        for target, module in registry.MODULES.items()
    ],
)
def test_short_fuzzing_run(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="the extra fuzz is not installed: no wheel for this Python or machine")
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    known = seeds_of(target)
    for number, data in enumerate(known[:: 1 + len(known) // SEED_COUNT_MAX]):
        (seeds / str(number)).write_bytes(data)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz", target),
            f"-max_total_time={FUZZ_S}",
            f"-runs={FUZZ_RUNS}",
            f"-artifact_prefix={tmp_path}/",
            str(seeds),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "Done " in ended.stderr, ended.stderr[-2000:]
