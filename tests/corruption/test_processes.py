"""The same with real processes: an operator's view of a bit that flips on a master's disk under load."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ha.store.checkpoint import load_checkpoint
from ha.store.files import OsDisk
from tests.corruption.harm import flip
from tests.scenarios.brokers import REPOSITORY, Broker, eventually, slave_of, wait_in_sync
from tests.scenarios.producing import Client

pytestmark = pytest.mark.processes


def damage_of(broker: Broker) -> dict[str, Any]:
    found: dict[str, Any] = broker.status()["damage"]["log"]
    return found


def ha_status(*brokers: Broker) -> str:
    admins = [part for broker in brokers for part in ("--admin", broker.addresses["admin"])]
    command = [sys.executable, "-m", "ha.cli", "status", *admins]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False).stdout


def test_a_bit_flips_on_the_masters_disk(tmp_path: Path) -> None:
    with Broker(tmp_path / "m", "SYNC_MASTER", scrubPauseSeconds=1, scrubBytesPerSecond=0) as master:
        master.start()
        with slave_of(master, tmp_path / "s") as slave:
            slave.start()
            wait_in_sync(master)
            with Client(master.addresses["remoting"]) as client:
                assert {answer.code for answer in client.send_all(range(300), size=1500)} == {0}
            end = master.end
            eventually("the slave has it all", lambda: slave.end == end)
            master.stop()
            whole = {path.name: path.read_bytes() for path in sorted(master.commitlog.iterdir())}
            assert len(whole) > 1
            first = master.commitlog / f"{0:020d}"
            flip(first, 100_000)
            master.start(healFrom=slave.addresses["ha"])
            # Somebody reads it: another slave, from the first byte on.
            with slave_of(master, tmp_path / "t", haStartFrom="first") as third:
                third.start()
                eventually("the third has it all", lambda: third.end == end)
                damage = damage_of(master)
                assert (damage["found_count"], damage["healed_count"], damage["open_count"]) == (1, 1, 0)
                assert damage["healed"][0]["file"] == first.name
                assert re.search(r"repaired since start: 1 log ranges", ha_status(master))
                third.stop()
            slave.stop()
            master.stop()
            for folder in (master.commitlog, slave.commitlog, tmp_path / "t" / "store" / "commitlog"):
                found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
                assert found == whole, folder
            log = master.log()
            place = f"file={first.name} begin=98304 end=131072"
            assert f"commitlog.damage_found {place} found_by=replication" in log
            assert f"commitlog.healed {place} from='{slave.addresses['ha']}'" in log
            assert "Traceback" not in log


def test_a_bit_flips_in_the_last_record_of_a_master_that_is_killed(tmp_path: Path) -> None:
    """No following record distinguishes it from a torn tail; the log does not end before it."""
    with Broker(tmp_path / "m", "SYNC_MASTER", flushDiskType="SYNC_FLUSH") as master:
        master.start()
        with slave_of(master, tmp_path / "s") as slave:
            slave.start()
            wait_in_sync(master)
            with Client(master.addresses["remoting"]) as client:
                assert {answer.code for answer in client.send_all(range(100), size=1500)} == {0}
                checkpoint = master.root / "checkpoint"
                eventually("a checkpoint", lambda: load_checkpoint(OsDisk(), checkpoint).physic_msg_timestamp_ms > 0)
                assert {answer.code for answer in client.send_all(range(3), size=1500)} == {0}
                end = master.end
                eventually("the queues know it", lambda: master.status()["commitlog"]["dispatched_offset"] == end)
                eventually("the slave has it all", lambda: slave.end == end)
                master.kill()
            whole = {path.name: path.read_bytes() for path in sorted(master.commitlog.iterdir())}
            whole = {name: content for name, content in whole.items() if int(name) < end}  # one more waits for puts
            last = master.commitlog / max(whole)
            flip(last, end - int(last.name) - 700)
            master.start(healFrom=slave.addresses["ha"])
            eventually("it is healed", lambda: damage_of(master)["healed_count"] == 1)
            assert master.end == slave.end == end
            slave.stop()
            master.stop()
            assert {name: (master.commitlog / name).read_bytes() for name in whole} == whole
            assert re.search(
                rf"commitlog.damage_found file={last.name} begin=\d+ end={end} found_by=recovery", master.log()
            )
