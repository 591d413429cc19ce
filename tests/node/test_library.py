"""A node inside a program: open_master and open_slave, in one event loop, on ports that the system chooses."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated

import ha
from ha.errors import AddressInUse, ConfigError, HalogError, StoreLocked
from ha.namesrv import NameServerOptions, open_name_server
from ha.node import Node
from ha.node.platform import Platform
from ha.node.ports import join
from ha.node.startup import open_node
from ha.node.status import describe
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.properties import decode_properties
from ha.protocol.record import decode_record, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import HALF_TOPIC, SCHEDULE_TOPIC
from ha.remoting import BoundPort, open_remoting_client
from ha.replication.progress import SlaveState
from tests.broker.few_descriptors import FewDescriptors
from tests.interop.processes import free_ports
from tests.store.stores import dispatched


def config(root: Path, **keys: Any) -> ha.Config:
    return ha.Config(
        **{
            "listen_port": 0,
            "broker_name": "a",
            "store_path_root_dir": str(root),
            "segment_size": 1 << 20,
            "index_slot_count": 1000,
            "index_entry_count": 4000,
            **keys,
        }
    )


def slave_config(root: Path, master: Node, **keys: Any) -> ha.Config:
    assert master.name_server_address is not None
    return config(root, broker_role="SLAVE", name_server_addresses=master.name_server_address, **keys)


async def attached(master: Node) -> None:
    with trio.fail_after(30):
        await master.ha_service.wait_state(SlaveState.TRANSFER)


def only_error(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        [group] = group.exceptions
    return group


async def test_the_status_shows_what_waits(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        delayed = ha.LogMessage(topic=SCHEDULE_TOPIC, queue_id=17, body=b"x", properties=b"DELAY\x0118\x02")
        half = ha.LogMessage(topic=HALF_TOPIC, queue_id=0, body=b"x")
        await master.put_many([delayed, half, half])
        await dispatched(master.store)
        shown = msgspec.to_builtins(describe(master), str_keys=True)
        assert shown["delay"]["waiting_counts"] == {"18": 1}
        assert shown["transactions"]["open_count"] == 2


async def test_the_own_name_server_shows_its_address(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path, bind_address="127.0.0.2")) as master, open_remoting_client() as client:
        assert master.name_server_address is not None
        asked = RemotingCommand(RequestCode.GET_NAMESRV_CONFIG)
        answer = await client.invoke(master.name_server_address, asked, 10)
        shown = dict(line.split("=") for line in bytes(answer.body).decode().splitlines())
        assert f"{shown['bindAddress']}:{shown['listenPort']}" == master.name_server_address


async def test_put_and_read_back(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        result = await master.put(ha.LogMessage(topic="greetings", queue_id=0, body=b"hello"))
        assert (result.status, result.physical_offset, result.queue_offset) == (ha.PutStatus.PUT_OK, 0, 0)
        record = decode_record(bytes(await master.store.log.read(0, 1 << 16)))
        assert (record.topic, bytes(record.body)) == ("greetings", b"hello")
        assert record.store_host == ("127.0.0.1", int(master.remoting_address.split(":")[1]))
        assert record.born_timestamp_ms > 0
        assert len(decode_properties(bytes(record.properties))["UNIQ_KEY"]) == 32
        topic = master.broker.topics.get("greetings")
        assert topic is not None
        assert topic.write_queue_nums == 8


def disk_bytes(root: Path) -> int:
    """As `du` counts them."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*"))


@pytest.mark.parametrize("preallocate", [False, True])
async def test_a_log_takes_its_space_at_once_only_if_it_is_told_to(tmp_path: Path, preallocate: bool) -> None:
    """Queue and index files have RocketMQ's sizes."""
    segment_size = 64 << 20
    sizes = {"segment_size": segment_size, "index_slot_count": 5_000_000, "index_entry_count": 20_000_000}
    async with ha.open_master(config(tmp_path, preallocate=preallocate, **sizes)) as master:
        assert (await master.put(ha.LogMessage(topic="t", queue_id=0, body=b"x"))).status is ha.PutStatus.PUT_OK
        [segment] = (tmp_path / "commitlog").iterdir()
        assert segment.stat().st_size == segment_size
    taken = disk_bytes(tmp_path)
    assert taken >= segment_size if preallocate else taken < 2 << 20


async def test_a_queue_is_read(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        messages = [ha.LogMessage(topic="t", queue_id=1, body=b"%d" % number) for number in range(300)]
        await master.put_many(messages)
        got = []
        async for record in master.messages("t", 1, 10):
            got.append((record.queue_offset, bytes(record.body)))
            if len(got) == 290:
                break
        assert got == [(number, b"%d" % number) for number in range(10, 300)]
        result = await master.read("t", 1, 295, count_max=3)
        assert [bytes(record.body) for record in result.messages] == [b"295", b"296", b"297"]
        assert (result.next_offset, result.min_offset, result.max_offset) == (298, 0, 300)
        for topic, queue_id, offset, end in (("t", 1, 300, 300), ("t", 0, 0, 0), ("nope", 0, 0, 0)):
            result = await master.read(topic, queue_id, offset)
            assert (result.messages, result.next_offset, result.max_offset) == ([], offset, end)


async def test_a_new_topic_has_all_queues_of_its_first_messages(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        await master.put_many([ha.LogMessage(topic="t", queue_id=queue_id, body=b"x") for queue_id in (0, 19, 3)])
        created = master.broker.topics.get("t")
        assert created is not None
        assert (created.write_queue_nums, created.read_queue_nums) == (20, 20)


async def test_reading_waits_for_messages(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master, trio.open_nursery() as nursery:
        reading = master.messages("t", 0)
        for number in range(3):
            message = ha.LogMessage(topic="t", queue_id=0, body=b"%d" % number)
            nursery.start_soon(master.put, message)
            with trio.fail_after(30):
                assert bytes((await anext(reading)).body) == message.body
            assert reading.next_offset == number + 1


async def test_reading_goes_on_once_files_can_be_opened(tmp_path: Path) -> None:
    disk = FewDescriptors()
    async with open_node(config(tmp_path), Platform(disk=disk)) as node:
        await node.put(ha.LogMessage(topic="t", queue_id=0, body=b"x"))
        await dispatched(node.store)
        disk.is_exhausted = True
        node.store.queues._files._files.clear()

        async def close_files() -> None:
            await trio.sleep(0.2)
            disk.is_exhausted = False

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close_files)
            with trio.fail_after(10):
                assert bytes((await anext(node.messages("t", 0))).body) == b"x"
            assert not disk.is_exhausted


async def test_what_can_not_be_put_says_why_and_stops_nothing(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path, auto_create_topic=False)) as master:
        await master.broker.topics.ensure("known", 4)
        results = await master.put_many(
            [
                ha.LogMessage(topic="known", queue_id=0, body=b"1"),
                ha.LogMessage(topic="unknown", queue_id=0, body=b"2"),
                ha.LogMessage(topic="b@d", queue_id=0, body=b"3"),
                ha.LogMessage(topic="known", queue_id=0, body=b"4"),
            ]
        )
        ok, illegal = ha.PutStatus.PUT_OK, ha.PutStatus.MESSAGE_ILLEGAL
        assert [result.status for result in results] == [ok, illegal, illegal, ok]
        assert "does not exist" in results[1].remark
        assert "illegal characters" in results[2].remark
        assert [result.queue_offset for result in results] == [0, -1, -1, 1]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"queue_id": -1}, "queue_id"),
        ({"queue_id": 16_384}, "Expected `int` <= 16383 - at `$.queue_id`"),
        ({"queue_id": 1 << 31}, "queue_id"),
        ({"topic": b"t"}, "topic"),
        ({"body": "text"}, "Expected `bytes`, got `str` - at `$.body`"),
        ({"properties": "TAGS\x01a\x02"}, "properties"),
        ({"properties": b"A\x01\0\x02"}, "NUL"),
        ({"flag": 1 << 31}, "flag"),
        ({"sys_flag": 1 << 40}, "sys_flag"),
        ({"born_timestamp_ms": 1 << 63}, "born_timestamp_ms"),
        ({"born_host": b"\x7f\x00\x00\x01"}, "born_host"),
        ({"reconsume_times": 1 << 31}, "reconsume_times"),
        ({"prepared_transaction_offset": 1 << 63}, "prepared_transaction_offset"),
    ],
)
async def test_values_that_fit_into_no_record_are_refused(values: dict[str, Any], why: str, tmp_path: Path) -> None:
    """Some were acknowledged, others ended the node if its log had to wait for the next file."""
    async with ha.open_master(config(tmp_path)) as master:
        good = ha.LogMessage(topic="t", queue_id=0, body=memoryview(b"x"), born_host=encode_host("::1", 7))
        results = await master.put_many([good, msgspec.structs.replace(good, **values), good])
        ok, illegal = ha.PutStatus.PUT_OK, ha.PutStatus.MESSAGE_ILLEGAL
        assert [result.status for result in results] == [ok, illegal, ok]
        assert why in results[1].remark
        created = master.broker.topics.get("t")
        assert created is not None
        assert created.write_queue_nums == 8


async def test_properties_of_the_caller_are_kept(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        for properties in (b"TAGS\x01en", b"TAGS\x01en\x02", b"TAGS\x01en\x02UNIQ_KEY\x01mine\x02"):
            result = await master.put(ha.LogMessage(topic="t", queue_id=0, body=b"x", properties=properties))
            record = decode_record(bytes(await master.store.log.read(result.physical_offset, 1 << 16)))
            stored = decode_properties(bytes(record.properties))
            assert stored["TAGS"] == "en"
            assert ("mine" in stored["UNIQ_KEY"]) == (b"mine" in properties)


async def test_a_sync_master_with_a_slave_and_without(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path / "m", broker_role="SYNC_MASTER")) as master:
        message = ha.LogMessage(topic="t", queue_id=0, body=b"x" * 1000)
        result = await master.put(message)
        assert (result.status, result.remark) == (ha.PutStatus.SLAVE_NOT_AVAILABLE, "no slave is connected")
        assert describe(master)["degraded_reason"] == "messages are stored on one node only: no slave is connected"
        async with ha.open_slave(slave_config(tmp_path / "s", master)) as slave:
            await attached(master)
            with trio.fail_after(30):
                # Until it counts: its first acknowledgement may be on its way.
                while (await master.put(message)).status is not ha.PutStatus.PUT_OK:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            results = await master.put_many([message] * 100)
            assert {each.status for each in results} == {ha.PutStatus.PUT_OK}
            assert slave.store.log.max_offset.value == master.store.log.max_offset.value
            assert (await slave.put(message)).status is ha.PutStatus.SERVICE_NOT_AVAILABLE
            assert slave.not_ready() == ""
            reasons = ("degraded_reason", "single_copy_reason")
            assert [describe(node)[reason] for node in (master, slave) for reason in reasons] == [""] * 4
    ends = [(tmp_path / role / "commitlog" / f"{0:020}").read_bytes() for role in ("m", "s")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("keys", "degraded", "alone"),
    [
        ({}, "", "no slave is connected"),
        ({"broker_role": "SYNC_MASTER", "in_sync_replicas": 1}, "", "no slave is connected"),
        (
            {"broker_role": "SYNC_MASTER", "all_ack_in_sync_state_set": True},
            "messages are stored on one node only: no slave is connected",
            "no slave is connected",
        ),
        (
            {"broker_role": "SYNC_MASTER", "min_in_sync_replicas": 2, "in_sync_replicas": 3},
            "messages are stored on one node only: no slave is connected",
            "no slave is connected",
        ),
    ],
)
async def test_what_the_status_says_of_a_master_alone(
    tmp_path: Path, keys: dict[str, Any], degraded: str, alone: str
) -> None:
    async with ha.open_master(config(tmp_path, **keys)) as master:
        shown = describe(master)
        assert (shown["degraded_reason"], shown["single_copy_reason"]) == (degraded, alone)


async def test_a_second_slave_that_is_missing_is_told(tmp_path: Path) -> None:
    keys = {"broker_role": "SYNC_MASTER", "in_sync_replicas": 3, "slave_timeout_ms": 100}
    async with (
        ha.open_master(config(tmp_path / "m", **keys)) as master,
        ha.open_slave(slave_config(tmp_path / "s", master)),
    ):
        await attached(master)
        with trio.fail_after(30):
            while master.ha_service.in_sync_replicas_nums(master.store.log.max_offset.value) < 2:  # noqa: ASYNC110
                await trio.sleep(0.05)
        told = describe(master)["degraded_reason"]
        assert told == "messages are stored on 2 of 3 nodes: too few slaves are connected"


async def test_both_ports_of_replication_and_metadata_reach_the_slave(tmp_path: Path) -> None:
    """The slave knows the name server alone; topics come with the copying of tables, not with the log."""
    async with ha.open_master(config(tmp_path / "m")) as master:
        await master.broker.topics.ensure("empty-topic", 3)
        async with ha.open_slave(slave_config(tmp_path / "s", master)) as slave:
            copied = trio.Event()
            slave.broker.topics.subscribe(copied.set)
            with trio.fail_after(30):
                if slave.broker.topics.get("empty-topic") is None:
                    await copied.wait()
            assert slave.broker.topics.get("empty-topic") is not None
            assert slave.ha_client is not None
            assert slave.ha_client.statistics().master_address == master.ha_address


def fast_port_config(root: Path, port: int) -> ha.Config:
    """A node whose listenPort is given, so that there is a fast port; the others are the system's choice."""
    return config(root, listen_port=port, ha_listen_port=0, admin_listen_port=0, name_server_addresses="127.0.0.1:1")


async def test_topics_can_be_copied_from_the_fast_port_and_nothing_pulled(tmp_path: Path) -> None:
    port = free_ports()
    async with (
        ha.open_master(fast_port_config(tmp_path, port)),
        open_remoting_client() as client,
    ):
        fast = f"127.0.0.1:{port - 2}"
        answer = await client.invoke(fast, RemotingCommand(RequestCode.GET_ALL_TOPIC_CONFIG), 5)
        assert answer.code == ResponseCode.SUCCESS
        assert b"SELF_TEST_TOPIC" in bytes(answer.body)
        answer = await client.invoke(fast, RemotingCommand(RequestCode.PULL_MESSAGE), 5)
        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


async def test_a_node_goes_on_without_the_fast_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_ports()
    with BoundPort("", "127.0.0.1", port - 2) as taken:
        [listener] = taken.listen()
        async with (
            listener,
            ha.open_master(fast_port_config(tmp_path, port)) as master,
        ):
            assert (await master.put(ha.LogMessage(topic="t", queue_id=0, body=b"x"))).status is ha.PutStatus.PUT_OK
    assert f"node.fast_port_unavailable port={port - 2}" in caplog.text


async def test_a_slave_of_a_slave(tmp_path: Path) -> None:
    async with (
        ha.open_master(config(tmp_path / "m")) as master,
        ha.open_slave(slave_config(tmp_path / "s", master)) as slave,
        ha.open_slave(slave_config(tmp_path / "t", master, broker_id=2, ha_master_address=slave.ha_address)) as second,
    ):
        await master.put(ha.LogMessage(topic="t", queue_id=0, body=b"x"))
        with trio.fail_after(30):
            await second.store.log.max_offset.wait_beyond(master.store.log.max_offset.value - 1)
            assert bytes((await anext(second.messages("t", 0))).body) == b"x"
        assert slave.ha_service.statistics().slave_count == 1  # it is not the master that `second` follows


async def test_cancelling_the_block_closes_the_store(tmp_path: Path) -> None:
    with trio.CancelScope() as scope:
        async with ha.open_master(config(tmp_path)) as master:
            await master.put(ha.LogMessage(topic="t", queue_id=0, body=b"x"))
            scope.cancel()
            await trio.sleep_forever()
    assert not (tmp_path / "abort").exists()


async def test_the_caller_s_error_comes_out(tmp_path: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with ha.open_master(config(tmp_path)):
            raise KeyError("mine")
    assert isinstance(only_error(caught.value), KeyError)
    assert not (tmp_path / "abort").exists()


async def test_opening_twice(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        with pytest.raises(StoreLocked):
            async with ha.open_master(config(tmp_path)):
                pass
        port = int(master.admin_address.split(":")[1])
        with pytest.raises(AddressInUse) as caught:
            async with ha.open_master(config(tmp_path / "other", admin_listen_port=port)):
                pass
        assert (caught.value.key, caught.value.port) == ("adminListenPort", port)
    assert not (tmp_path / "other").exists()


async def test_the_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="brokerRole: SLAVE is not a master role"):
        async with ha.open_master(config(tmp_path, broker_role="SLAVE")):
            pass
    with pytest.raises(ConfigError, match="brokerRole: ASYNC_MASTER is not a slave role"):
        async with ha.open_slave(config(tmp_path)):
            pass


async def test_a_directory_in_place_of_a_configuration() -> None:
    with pytest.raises(TypeError, match=r"as ha\.Config\(store_path_root_dir='data'\)"):
        async with ha.open_master(Path("data")):  # type: ignore[arg-type]
            pass
    with pytest.raises(TypeError, match=r"config is not a ha\.Config: 10911$"):
        async with ha.open_slave(10911):  # type: ignore[arg-type]
            pass


async def test_ports_are_free_again_after_a_failed_start(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        port = int(master.remoting_address.split(":")[1])
    for _ in range(2):
        with pytest.raises(HalogError):
            async with ha.open_master(
                config(
                    tmp_path,
                    listen_port=port,
                    ha_listen_port=0,
                    admin_listen_port=0,
                    name_server_addresses="127.0.0.1:1",
                    broker_ip1="x.invalid",
                )
            ):
                pass
    async with ha.open_master(
        config(tmp_path, listen_port=port, ha_listen_port=0, admin_listen_port=0, name_server_addresses="127.0.0.1:1")
    ):
        pass


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        ({}, []),
        ({"bind_address": "0.0.0.0"}, ["port=remoting", "port=ha"]),
        ({"admin_bind_address": "0.0.0.0"}, ["port=admin"]),
    ],
)
async def test_warns_of_plain_text_beyond_loopback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: dict[str, str], warned: list[str]
) -> None:
    with caplog.at_level(logging.WARNING, "ha.node"):
        async with ha.open_master(config(tmp_path, **keys)) as master:
            assert master.remoting_address.startswith("127." if "bind_address" not in keys else "")
    texts = [record.getMessage() for record in caplog.records if record.name == "ha.node.config_warnings"]
    assert [text.split()[1] for text in texts] == warned


async def test_events_are_the_last_log_lines(tmp_path: Path) -> None:
    async with ha.open_master(config(tmp_path)) as master:
        logging.getLogger("ha.x").error("boom number=%d", 1)
        newest = master.events.newest_first()[0]
        assert (newest.level, newest.logger, newest.text) == ("ERROR", "ha.x", "boom number=1")
        for number in range(100):
            logging.getLogger("ha.x").error("boom number=%d", number)
        assert len(master.events.newest_first()) == 50
    assert not [handler for handler in logging.getLogger("ha").handlers if handler is master.events]


def test_import_loads_nothing() -> None:
    code = "import ha, sys; print(sorted({m.split('.')[0] for m in sys.modules} & {'trio', 'msgspec', 'hypercorn'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_promised_name_is_there() -> None:
    for name in ha.__all__:
        assert getattr(ha, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ha.nothing  # noqa: B018


async def test_a_stop_hands_everything_to_the_slave_first(tmp_path: Path) -> None:
    """Ten megabytes put without waiting for anybody; the slave has them all when the master is gone."""
    name_server = NameServerOptions(port=0)
    async with open_name_server(name_server) as names:
        address = join(*names.address)
        async with ha.open_slave(config(tmp_path / "s", broker_role="SLAVE", name_server_addresses=address)) as slave:
            async with ha.open_master(config(tmp_path / "m", name_server_addresses=address)) as master:
                with trio.fail_after(60):
                    await master.ha_service.wait_state(SlaveState.TRANSFER)
                for _ in range(100):
                    await master.put(ha.LogMessage(topic="t", queue_id=0, body=b"x" * 100_000))
                end = master.store.log.max_offset.value
            assert slave.store.log.max_offset.value == end


async def test_grpc_clients_are_told_that_their_master_stops(tmp_path: Path) -> None:
    """GOAWAY: they go on to another address at once, and lose no call."""
    port = free_ports()
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    async with ha.open_master(config(tmp_path, grpc_listen_port=port)):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(client.data_to_send())
        events = client.receive_data(await stream.receive_some())
    async with stream:
        async for chunk in stream:
            events += client.receive_data(chunk)
    [end] = [event for event in events if isinstance(event, ConnectionTerminated)]
    assert end.error_code == ErrorCodes.NO_ERROR
