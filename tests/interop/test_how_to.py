"""Runs every command of docs/attach-to-rocketmq.md and docs/disaster-recovery.md, in order, against a real master.

Only the name server's address is replaced. Ports, which the system chooses, and file sizes come from the environment.
"""

from functools import partial
from pathlib import Path

import pytest
import trio

from ha.protocol.store_files import segment_name
from tests.docs.pages import blocks, run_script, traced
from tests.interop.broker import INDEX_ENTRY_COUNT, INDEX_SLOT_COUNT, SEGMENT_SIZE
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server

COUNT = 300
FILL = f"seq {COUNT} | sed 's/^/order /' | ha produce orders --stdin"
# In addition to the pages: the slave has every message, and so has the master it becomes.
COUNTED = f"""
test $(ha consume orders --broker slave | grep -c '^order ') = {COUNT}
"""
KEPT = f"""
test $(ha consume orders --broker master | grep -c '^order ') = {COUNT}
"""


@pytest.mark.parametrize("release", ["5.5.0", pytest.param("4.9.7", marks=pytest.mark.long)], indirect=True)
async def test_attach_a_slave_and_promote_it(release: Release, children: Children, workplace: Path) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "ASYNC_MASTER")
    master.extra = {"brokerClusterName": "DefaultCluster"}
    await master.start()
    await master.wait_sampled()
    assert master.child is not None

    attach, drill = blocks("attach-to-rocketmq.md"), blocks("disaster-recovery.md")
    again = next(number for number, block in enumerate(drill) if "after-the-loss" in block)
    steps = [FILL, *attach, COUNTED, *drill[: again + 1], KEPT, *drill[again + 1 :]]
    script = traced(
        ["export NAMESRV_ADDR=127.0.0.1:9876", *steps], lambda text: text.replace("127.0.0.1:9876", name_server)
    )
    environment = {
        "HA_LISTEN_PORT": "0",
        "HA_MAPPED_FILE_SIZE_COMMIT_LOG": str(SEGMENT_SIZE),
        "HA_MAX_HASH_SLOT_NUM": str(INDEX_SLOT_COUNT),
        "HA_MAX_INDEX_NUM": str(INDEX_ENTRY_COUNT),
        "BROKER_PID": str(master.child.pid),
        "OLD_STORE": str(master.store),
    }
    folder = workplace / "slave"
    folder.mkdir()
    output = await trio.to_thread.run_sync(partial(run_script, script, folder, environment=environment))
    assert output.count(">>> block") == len(steps) + 1
    assert '"is_equal": true' in output, "the old disk has nothing that the new master lacks"
    assert output.count(": equal; ") == 1, "the two copies are one log"
    copied = (folder / "data" / "second" / "commitlog" / segment_name(0)).read_bytes()
    assert b"after-the-loss" in copied
