"""Random bits, hundreds of them, in the files of a running node: found, repaired, and nothing wrong served.

Each byte is as likely to be hit as any other. The checksum files are left out: a bit there *and* one in the part of a
record that its own CRC doesn't cover, at the same time and in the same 2 MiB, are two faults; one of them stays hidden.
"""

from pathlib import Path
from random import Random

import pytest
import trio

from tests.corruption.harm import flip
from tests.corruption.pair import Pair, bodies, consumer_of, contents, healed, split

ROUND_COUNT = 4
BITS_PER_ROUND = 40


def targets(store: Path, ends: dict[str, int]) -> list[tuple[Path, int]]:
    """Returns the files that may be damaged, and how many bytes of each are used."""
    found = []
    for folder in ("commitlog", "consumequeue", "index"):
        for path in sorted(path for path in (store / folder).rglob("*") if path.is_file()):
            used = len(path.read_bytes().rstrip(b"\0")) if folder in ("consumequeue", "index") else path.stat().st_size
            if folder == "commitlog":
                used = min(path.stat().st_size, ends["commitlog"] - int(path.name))
            if used > 0:
                found.append((path, used))
    return found


@pytest.mark.parametrize("role", ["master", "slave"])
@pytest.mark.parametrize("seed", [1])
async def test_random_bits(role: str, seed: int, pair: Pair) -> None:
    random = Random(seed)
    folders = ("commitlog", "consumequeue")
    whole = {folder: contents(pair.store(role), folder) for folder in folders}
    log = b"".join(whole["commitlog"].values())
    good = set(split_log(log))
    with trio.fail_after(120):
        async with pair.running():
            store = pair.node(role).store
            end = store.log.max_offset.value
            for _ in range(ROUND_COUNT):
                files = targets(pair.store(role), {"commitlog": end})
                for path, used in random.choices(files, [used for _, used in files], k=BITS_PER_ROUND):
                    flip(path, random.randrange(used))
                async with consumer_of(pair.node(role)) as consumer:
                    await consumer.pull_all()
                    assert consumer.got == bodies()
                    for raw in consumer.raw:
                        assert all(record in good for record in split(raw)), "bytes that nobody wrote"
                await store.scrub.wait_round()
                await healed(pair.node(role))
                await store.scrub.wait_round()  # what is derived from a range that was damaged before
                for folder in folders:
                    assert contents(pair.store(role), folder) == whole[folder], folder
            assert store.damage.found_count == store.damage.healed_count > ROUND_COUNT
    for folder in folders:
        assert contents(pair.store(role), folder) == whole[folder], folder


def split_log(log: bytes) -> list[bytes]:
    """Returns the records of a whole log from offset 0 on, by its sizes and fillers."""
    found = []
    at = 0
    while at < len(log) and (size := int.from_bytes(log[at : at + 4], "big")):
        if log[at + 4 : at + 8] != bytes.fromhex("cbd43194"):
            found.append(log[at : at + size])
        at += size
    return found
