"""The commitlog: every reader logs damage, none serves it, and the peer's bytes replace it."""

import logging
from pathlib import Path

import pytest
import trio

from ha.errors import DamagedBytes
from ha.node.metrics import samples
from ha.node.status import describe
from ha.replication import healer
from tests.corruption.harm import HARMS
from tests.corruption.pair import SEGMENT, Pair, bodies, consumer_of, contents, followed, healed, split
from tests.interop.processes import free_ports
from tests.store.stores import reached

NAME = f"{SEGMENT:020d}"
POSITION = 100_000
"""Within the second segment, of three"""


def other(role: str) -> str:
    return "slave" if role == "master" else "master"


def in_a_body(segment: bytes) -> int:
    """Returns a position that a record's CRC covers, so that recovery finds damage there too."""
    return segment.index(b"TAGS\x01t", POSITION) - 60


def check_named(pair: Pair, role: str, found_by: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Checks that log, status and counters show what was damaged, what found it, and the source of the repair."""
    node = pair.node(role)
    page = describe(node)["damage"]
    assert page.log.open_count == page.log.open_bytes == 0  # type: ignore[attr-defined]
    assert page.log.found_count == page.log.healed_count >= 1  # type: ignore[attr-defined]
    for damage in page.log.healed:  # type: ignore[attr-defined]
        assert damage.file == name
        assert damage.found_by == found_by
        assert damage.healed_from == f"127.0.0.1:{pair.ha_ports[other(role)]}"
        assert damage.found_ms <= damage.healed_ms
    counted = {name: value for name, labels, value in samples(node) if not labels}
    assert counted["halog_damage_found_total"] == counted["halog_damage_healed_total"] == page.log.found_count  # type: ignore[attr-defined]
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(f"commitlog.damage_found file={name}" in line and f"found_by={found_by}" in line for line in lines)
    assert any(f"commitlog.healed file={name}" in line for line in lines)


@pytest.mark.parametrize("kind", HARMS)
@pytest.mark.parametrize("role", ["master", "slave"])
@pytest.mark.parametrize("found_by", ["recovery", "pull", "replication", "scrub"])
async def test_damage_is_logged_healed_and_never_served(
    kind: str, role: str, found_by: str, pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = contents(pair.store("master"), "commitlog")
    # Recovery looks at the last segment alone after a clean stop.
    name = max(whole) if found_by == "recovery" else NAME
    victim = pair.store(role) / "commitlog" / name
    harm = HARMS[kind]
    at = in_a_body(whole[name])
    if found_by == "recovery":
        harm(victim, at)
    with trio.fail_after(60):
        async with pair.running():
            node = pair.node(role)
            if found_by != "recovery":
                harm(victim, at)
            if found_by == "scrub":
                await node.store.scrub.wait_round()
            if found_by == "replication":
                third = tmp_path / "third"
                async with pair.slave_of(node, third, free_ports(), ha_start_from="first") as fresh:
                    await followed(node, fresh)
                assert contents(third, "commitlog") == whole
            async with consumer_of(node) as consumer:
                await consumer.pull_all()
                assert consumer.got == bodies()
            await healed(node)
            check_named(pair, role, found_by, name, caplog)
    for each in ("master", "slave"):
        assert contents(pair.store(each), "commitlog") == whole


async def test_a_bit_that_no_record_crc_covers_is_found_too(pair: Pair) -> None:
    """Born time, host, queue, a property: by its CRC the record is sound."""
    whole = contents(pair.store("master"), "commitlog")
    victim = pair.store("master") / "commitlog" / NAME
    at = whole[NAME].index(b"TAGS\x01t", POSITION)
    async with pair.running():
        HARMS["flip"](victim, at + 5)
        async with consumer_of(pair.master) as consumer:
            await consumer.pull_all()
            log = b"".join(whole.values())
            served = [record for raw in consumer.raw for record in split(raw)]
            assert consumer.got == bodies()
        assert pair.master.store.damage.found_count == 1
        assert len(served) == sum(map(len, bodies().values()))
        assert all(record in log for record in served)
    assert contents(pair.store("master"), "commitlog") == whole


async def test_without_a_peer_consumers_skip_the_damage(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node alone: 32 KiB of messages are skipped as in RocketMQ, all others are delivered once."""
    monkeypatch.setattr(healer, "ATTEMPTS", 1)
    victim = pair.store("master") / "commitlog" / NAME
    async with pair.running(without="slave", heal_from=""):
        HARMS["flip"](victim, POSITION)
        with trio.fail_after(30):
            async with consumer_of(pair.master) as consumer:
                await consumer.pull_all()
        [damage] = pair.master.store.damage.open
        assert damage.is_hopeless
        assert "healFrom" in damage.heal_trouble
        missing = 0
        for queue, expected in bodies().items():
            got = consumer.got[queue]
            kept = iter(expected)
            assert all(any(body == each for each in kept) for body in got), "in order, each once"
            missing += len(expected) - len(got)
        assert 10 < missing < 200
        assert len(consumer.answers) < 200, "no loop of empty answers"
        with pytest.raises(DamagedBytes):
            await pair.master.store.log.read(damage.begin, 100)


async def test_a_slave_waits_at_damage_and_the_remark_explains_it(pair: Pair, tmp_path: Path) -> None:
    victim = pair.store("master") / "commitlog" / NAME
    whole = contents(pair.store("master"), "commitlog")
    async with pair.running(without="slave", heal_from=""):
        master = pair.master
        HARMS["zero"](victim, POSITION)
        third = tmp_path / "third"
        async with pair.slave_of(master, third, free_ports(), ha_start_from="first") as fresh:
            with trio.fail_after(30):
                while not master.store.damage.open:
                    await master.store.damage.wait_changed()
                begin = master.store.damage.open[0].begin
                await reached(fresh.store.log.max_offset, begin)
                await trio.sleep(1.2)  # two heartbeats
            assert fresh.store.log.max_offset.value == begin
            reason = master.ha_service.explain(master.store.log.max_offset.value)
            assert "damaged" in reason
            assert str(begin) in reason
            assert fresh.ha_client is not None
            assert fresh.ha_client.statistics().connection_count == 1
            # An operator puts a sound copy of the file back: found at the next try, and the slave goes on.
            victim.write_bytes(whole[NAME])
            with trio.fail_after(30):
                await followed(master, fresh)
    assert contents(third, "commitlog") == whole


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("role", ["master", "slave"])
async def test_a_missing_first_segment_is_healed(
    role: str, has_checksums: bool, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    whole = contents(pair.store("master"), "commitlog")
    name = min(whole)
    if not has_checksums:
        for path in (pair.store(role) / "checksums").iterdir():
            path.unlink()
    (pair.store(role) / "commitlog" / name).unlink()
    with trio.fail_after(60):
        async with pair.running():
            node = pair.node(role)
            assert node.store.log.min_offset == 0
            async with consumer_of(node) as consumer:
                await consumer.pull_all()
                assert consumer.got == bodies()
            await healed(node)
            check_named(pair, role, "recovery", name, caplog)
    assert contents(pair.store(role), "commitlog") == whole


@pytest.mark.parametrize(
    ("kind", "found_by"),
    [(kind, by) for kind in HARMS for by in ("recovery", "pull", "scrub") if (kind, by) != ("cut", "recovery")],
)
async def test_a_rocketmq_store_is_healed_by_its_records(kind: str, found_by: str, pair: Pair) -> None:
    """Without checksums the records are checked; the healed store has checksums like any other.

    Cut at its end while it was stopped: nobody knows where it ended, which is exit code 65 (tests/store/test_recovery).
    """
    whole = contents(pair.store("master"), "commitlog")
    sums = contents(pair.store("master"), "checksums")
    for path in (pair.store("master") / "checksums").iterdir():
        path.unlink()
    name = max(whole) if found_by == "recovery" else NAME
    victim = pair.store("master") / "commitlog" / name
    at = in_a_body(whole[name])
    if found_by == "recovery":
        HARMS[kind](victim, at)
    with trio.fail_after(60):
        async with pair.running():
            if found_by != "recovery":
                HARMS[kind](victim, at)
            if found_by == "scrub":
                await pair.master.store.scrub.wait_round()
            async with consumer_of(pair.master) as consumer:
                await consumer.pull_all()
                assert consumer.got == bodies()
            await healed(pair.master)
            assert pair.master.store.damage.found_count >= 1
            await pair.master.store.scrub.wait_round()
    assert contents(pair.store("master"), "commitlog") == whole
    assert contents(pair.store("master"), "checksums") == sums
