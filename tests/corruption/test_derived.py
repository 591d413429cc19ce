"""Consume queues, key index, checkpoint, checksums, tables: detected and repaired; readers get correct data."""

import logging
from pathlib import Path

import pytest
import trio

from ha.store.key_index import KeyIndex
from tests.corruption.harm import HARMS, flip
from tests.corruption.pair import MESSAGE_COUNT, QUEUES, SLOT_COUNT, Pair, bodies, consumer_of, contents

TAGS_CODE_AT = 12
"""Position of a queue entry."""


def first_file(store: Path, folder: str) -> Path:
    return min(path for path in (store / folder).rglob("*") if path.is_file())


async def check_consumed(pair: Pair, role: str, **given: str) -> None:
    async with consumer_of(pair.node(role), **given) as consumer:
        await consumer.pull_all()
        assert consumer.got == bodies()


async def check_keys(index: KeyIndex | None) -> None:
    """Checks that every message is found by its key."""
    assert index is not None
    await index.wait_attached()
    for number in range(0, MESSAGE_COUNT, 7):
        assert index.query(QUEUES[number % 3][0], f"k{number}", 64, 0, 1 << 62), number


@pytest.mark.parametrize("kind", HARMS)
@pytest.mark.parametrize("role", ["master", "slave"])
@pytest.mark.parametrize("found_by", ["recovery", "pull", "scrub"])
async def test_a_consume_queue(
    kind: str, role: str, found_by: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    whole = contents(pair.store(role), "consumequeue/T/0")
    victim = pair.store(role) / "consumequeue/T/0" / f"{0:020d}"
    if found_by == "recovery":
        HARMS[kind](victim, 20 * 50 + 7)
    with trio.fail_after(60):
        async with pair.running():
            if found_by != "recovery":
                HARMS[kind](victim, 20 * 50 + 7)
            if found_by == "scrub":
                await pair.node(role).store.scrub.wait_round()
                assert pair.node(role).store.scrub.statistics().queue_entries_mended_count > 0
            await check_consumed(pair, role)
            assert pair.node(role).store.damage.found_count == 0
    assert contents(pair.store(role), "consumequeue/T/0") == whole
    assert any(
        f"queue.{event} topic=T" in caplog.text for event in ("entries_repaired", "damage_found", "entries_lost")
    )


async def test_the_scrub_repairs_a_wrong_tags_code(pair: Pair) -> None:
    """A filter by tags code skips such a message; only the scrub notices."""
    whole = contents(pair.store("master"), "consumequeue/T/0")
    victim = pair.store("master") / "consumequeue/T/0" / f"{0:020d}"
    async with pair.running():
        flip(victim, 20 * 50 + TAGS_CODE_AT + 6)
        with trio.fail_after(60):
            await pair.master.store.scrub.wait_round()
        assert pair.master.store.scrub.statistics().queue_entries_mended_count == 1
        assert contents(pair.store("master"), "consumequeue/T/0") == whole


@pytest.mark.parametrize("kind", HARMS)
@pytest.mark.parametrize("role", ["master", "slave"])
@pytest.mark.parametrize("found_by", ["recovery", "scrub"])
@pytest.mark.parametrize("part", ["header", "slots", "entries"])
async def test_the_key_index(
    kind: str, role: str, found_by: str, part: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    position = {"header": 20, "slots": 40 + 4 * 100, "entries": 40 + 4 * 500 + 20 * 300 + 9}[part]
    victim = first_file(pair.store(role), "index")
    if found_by == "recovery":
        HARMS[kind](victim, position)
    with trio.fail_after(60):
        async with pair.running():
            store = pair.node(role).store
            if found_by == "scrub":
                HARMS[kind](victim, position)
            await store.scrub.wait_round()
            await check_keys(store.index)
            if found_by == "scrub":
                assert store.scrub.statistics().index_rebuilt_count == 1
                assert "index.damage_found" in caplog.text
            else:
                assert store.scrub.statistics().index_rebuilt_count == 1 or "index.file_deleted" in caplog.text
            await store.scrub.wait_round()
            assert store.scrub.statistics().index_rebuilt_count <= 1


async def test_a_wrong_hash_that_stays_in_its_chain(pair: Pair) -> None:
    """It breaks no chain, but its key is not found: a flipped bit where the slots are a power of two."""
    victim = first_file(pair.store("master"), "index")
    position = 40 + 4 * SLOT_COUNT + 20 * 300
    with trio.fail_after(60):
        async with pair.running():
            raw = bytearray(victim.read_bytes())
            was = int.from_bytes(raw[position : position + 4], "big")
            raw[position : position + 4] = (was + SLOT_COUNT if was < 1 << 30 else was - SLOT_COUNT).to_bytes(4, "big")
            with victim.open("r+b") as file:
                file.seek(position)
                file.write(raw[position : position + 4])
            store = pair.master.store
            await store.scrub.wait_round()
            assert store.scrub.statistics().index_rebuilt_count == 1
            await check_keys(store.index)


@pytest.mark.parametrize("kind", HARMS)
@pytest.mark.parametrize("is_running", [True, False])
async def test_a_damaged_checksum_file_is_rebuilt(kind: str, is_running: bool, pair: Pair) -> None:
    whole = contents(pair.store("master"), "checksums")
    victim = first_file(pair.store("master"), "checksums")
    if not is_running:
        HARMS[kind](victim, 700 if kind != "flip" else 514)
    async with pair.running(without="slave", heal_from=""):
        store = pair.master.store
        await check_consumed(pair, "master")
        if is_running:
            HARMS[kind](victim, 700 if kind != "flip" else 514)
        with trio.fail_after(60):
            await store.scrub.wait_round()
            await check_consumed(pair, "master")
        assert store.damage.found_count == 0
        assert store.damage_statistics().checksum_rebuilt_count >= 1
    assert contents(pair.store("master"), "checksums") == whole


@pytest.mark.parametrize("kind", HARMS)
@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_checkpoint(kind: str, is_clean: bool, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    whole = contents(pair.store("master"), "commitlog")
    HARMS[kind](pair.store("master") / "checkpoint", 2)
    if not is_clean:
        (pair.store("master") / "abort").write_bytes(b"")
    async with pair.running(without="slave"):
        await check_consumed(pair, "master")
        assert pair.master.store.damage.found_count == 0
    assert contents(pair.store("master"), "commitlog") == whole
    assert kind == "zero" or "checkpoint.damage_found" in caplog.text


@pytest.mark.parametrize("kind", HARMS)
async def test_a_damaged_table_is_logged_and_its_previous_version_used(
    kind: str, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """The queues exist in any case: auto-creation makes a topic that the old table lacks."""
    victim = pair.store("master") / "config" / "topics.json"
    backup = victim.with_name("topics.json.bak")
    backup.write_bytes(victim.read_bytes())
    HARMS[kind](victim, 0)
    with caplog.at_level(logging.ERROR):
        async with pair.running(without="slave"):
            await check_consumed(pair, "master")
    assert "config.file_damaged file=" in caplog.text
