"""Stores written by real brokers (tests/fixtures) open, read, and are rebuilt byte for byte."""

import shutil
from pathlib import Path

import pytest

from ha.protocol.record import decode_record
from ha.protocol.record_digest import TAG_INFIX
from ha.protocol.store_files import Checkpoint
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from tests.protocol.golden import STORES, manifest
from tests.unpacking import unpack_store


class Golden:
    def __init__(self, version: str, path: Path) -> None:
        self.root = path / "store"
        self.original = path / "original"
        unpack_store(version, self.original)
        shutil.copytree(self.original, self.root)
        self.manifest = manifest(version)
        self.options = StoreOptions(
            root=self.root,
            segment_size=16384,
            queue_entry_count=10,
            index_slot_count=1000,
            index_entry_count=4000,
            index_tags=version == "5.5.0",
        )

    def assert_unchanged(self, *folders: str) -> None:
        for folder in folders:
            names = {p.relative_to(self.original) for p in (self.original / folder).rglob("*") if p.is_file()}
            assert names == {p.relative_to(self.root) for p in (self.root / folder).rglob("*") if p.is_file()}
            for name in names:
                assert (self.root / name).read_bytes() == (self.original / name).read_bytes(), name


@pytest.fixture(params=STORES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return Golden(request.param, tmp_path)


async def test_an_opened_store_matches_its_manifest(golden: Golden) -> None:
    async with open_message_store(golden.options) as store:
        assert store.statistics().recovered_clean
        expected = golden.manifest["commitlog"]
        messages = [entry for entry in expected if entry["kind"] == "message"]
        for entry in messages:
            raw = await store.log.read(entry["offset"], entry["size"])
            record = decode_record(raw)
            assert record.total_size == entry["size"]
            assert (record.topic, record.queue_id, record.queue_offset) == (
                entry["topic"],
                entry["queueId"],
                entry["queueOffset"],
            )
            assert record.property_map() == entry["properties"]
            assert record.store_timestamp_ms == entry["storeTimestamp"]
        assert store.log.max_offset.value == messages[-1]["offset"] + messages[-1]["size"]
        entries = [
            [queue.topic, queue.queue_id, number, *entry]
            for queue in store.queues
            for number, entry in enumerate(queue.read(0, queue.max_offset))
        ]
        assert sorted(entries) == sorted(golden.manifest["consumequeue"])
        for entry in messages:
            for name in ("UNIQ_KEY", "KEYS"):
                for key in entry["properties"].get(name, "").split():
                    assert entry["offset"] in await store.query(entry["topic"], key, 64, 0, 1 << 62)
    golden.assert_unchanged("commitlog", "consumequeue", "index")


async def test_rebuilt_queues_and_index_equal_rocketmqs(golden: Golden) -> None:
    shutil.rmtree(golden.root / "consumequeue")
    index_name = next((golden.root / "index").iterdir()).name
    shutil.rmtree(golden.root / "index")
    async with open_message_store(golden.options):
        pass
    rebuilt = next((golden.root / "index").iterdir())
    rebuilt.rename(rebuilt.with_name(index_name))  # it is named after when it was made
    golden.assert_unchanged("commitlog", "consumequeue", "index")


async def test_the_tag_index_of_release_5(tmp_path: Path) -> None:
    golden = Golden("5.5.0", tmp_path)
    async with open_message_store(golden.options) as store:
        assert store.index is not None
        tagged = [e for e in golden.manifest["commitlog"] if e.get("properties", {}).get("TAGS") == "warm"]
        assert tagged
        found = store.index.query(tagged[0]["topic"], TAG_INFIX + "warm", 64, 0, 1 << 62)
        assert {entry["offset"] for entry in tagged} <= set(found)


async def test_the_checkpoint_keeps_its_times(golden: Golden) -> None:
    async with open_message_store(golden.options) as store:
        assert (
            store.checkpointer.checkpoint.physic_msg_timestamp_ms == golden.manifest["checkpoint"]["physicMsgTimestamp"]
        )
    written = Checkpoint.unpack((golden.root / "checkpoint").read_bytes())
    assert written.physic_msg_timestamp_ms == golden.manifest["checkpoint"]["physicMsgTimestamp"]
    assert written.logics_msg_timestamp_ms == golden.manifest["checkpoint"]["logicsMsgTimestamp"]
    assert (golden.root / "checkpoint").stat().st_size == 4096


async def test_it_opens_after_a_kill_of_the_broker(golden: Golden) -> None:
    (golden.root / "abort").write_bytes(b"")
    async with open_message_store(golden.options) as store:
        assert not store.statistics().recovered_clean
        entries = golden.manifest["commitlog"]
        assert store.log.max_offset.value == entries[-1]["offset"] + entries[-1]["size"]
        # RocketMQ's index carries no sign that it was synced, so it was built again.
    golden.assert_unchanged("commitlog", "consumequeue")
    [rebuilt] = (golden.root / "index").iterdir()
    [theirs] = (golden.original / "index").iterdir()
    assert rebuilt.read_bytes() == theirs.read_bytes()
