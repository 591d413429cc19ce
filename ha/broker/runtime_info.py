"""Requests about the broker itself: 28 GET_BROKER_RUNTIME_INFO, 26 GET_BROKER_CONFIG, 25 UPDATE_BROKER_CONFIG, and 906
EXCHANGE_BROKER_HA_INFO, which returns its replication addresses.

The answer to GET_BROKER_RUNTIME_INFO is RocketMQ's table of strings. Figures that halog does not have are omitted (put
latencies) or replaced by an equivalent: the queue of sends contains those in flight, and the queues of other thread
pools are empty, as requests are handled where they are read. Sources: AdminBrokerProcessor.prepareRuntimeInfo,
StoreStatsService.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ha.broker.core import BrokerCore
from ha.broker.message_queries import find_record
from ha.broker.throughput import Throughput
from ha.protocol import java_json
from ha.protocol.admin_requests import ExchangeRequest
from ha.protocol.codes import VERSION_DEFAULT, RequestCode, ResponseCode
from ha.protocol.config_body import change_fault, encode_config
from ha.protocol.headers import parse_header
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

VERSION_TEXT = "V5_3_3"
"""RocketMQ's name for the version number VERSION_DEFAULT."""


class RuntimeInfo:
    """Answers requests about the broker. `describe` returns its configuration by key, with secrets hidden."""

    def __init__(
        self,
        core: BrokerCore,
        throughput: Throughput,
        *,
        sends_in_flight: Callable[[], int],
        delay_figures: Callable[[], Mapping[str, str]],
    ) -> None:
        self._store = core.store
        self._topics = core.tables.topics
        self._standing = core.standing
        self._throughput = throughput
        self._options = core.options
        self._world = core.world
        self._sends_in_flight = sends_in_flight
        self._delay_figures = delay_figures
        self._boot_ms = core.world.wall_clock_ms()
        self._initial_max_offset = core.store.log.max_offset.value
        self.describe: Callable[[], Mapping[str, str]] = dict
        self.own_addresses: Callable[[], Mapping[str, str]] = dict
        """Returns the addresses to report, by name, for dashboards; RocketMQ reports none of them."""

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.GET_BROKER_RUNTIME_INFO: self.runtime,
            RequestCode.GET_BROKER_CONFIG: self.configuration,
            RequestCode.UPDATE_BROKER_CONFIG: self.configure,
            RequestCode.EXCHANGE_BROKER_HA_INFO: self.exchange_addresses,
        }

    async def runtime(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_RUNTIME_INFO (28): answers with statistics by name, as strings."""
        table = await self._table()
        table |= {**self._delay_figures(), **self.own_addresses()}
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps({"table": dict(sorted(table.items()))}))

    async def _table(self) -> dict[str, str]:
        store, rates = self._store, self._throughput
        log = store.log
        min_offset, max_offset = log.min_offset, log.max_offset.value
        paths = store.options.commitlog_path, store.options.root
        log_usage, root_usage = [await self._world.run_blocking(self._world.disk.usage, path) for path in paths]
        puts, gets = rates.puts_by_day(), rates.gets_by_day()
        stored_bytes = max_offset - self._initial_max_offset
        return {
            "bootTimestamp": str(self._boot_ms),
            "brokerActive": _text(not self._standing.is_slave),
            "brokerVersion": str(VERSION_DEFAULT),
            "brokerVersionDesc": VERSION_TEXT,
            "commitLogDirCapacity": f"Total : {byte_text(log_usage.total_bytes)}, Free : "
            f"{byte_text(log_usage.free_bytes)}.",
            "commitLogDiskRatio": str(log_usage.used_ratio),
            f"commitLogDiskRatio_{paths[0]}": str(log_usage.used_ratio),
            "commitLogMaxOffset": str(max_offset),
            "commitLogMinOffset": str(max(0, min_offset)),
            "consumeQueueDiskRatio": str(root_usage.used_ratio),
            "dispatchBehindBytes": str(max_offset - log.dispatched_offset.value),
            "earliestMessageTimeStamp": str(await self._earliest_ms()),
            "msgGetTotalTodayMorning": str(gets.today_morning),
            "msgGetTotalTodayNow": str(gets.now),
            "msgGetTotalYesterdayMorning": str(gets.yesterday_morning),
            "msgPutTotalTodayMorning": str(puts.today_morning),
            "msgPutTotalTodayNow": str(puts.now),
            "msgPutTotalYesterdayMorning": str(puts.yesterday_morning),
            "pageCacheLockTimeMills": "0",
            "putMessageAverageSize": str(stored_bytes / max(1, puts.now)),
            "putMessageSizeTotal": str(stored_bytes),
            "putMessageTimesTotal": str(puts.now),
            "remainHowManyDataToFlush": byte_text(max_offset - log.flushed_offset.value),
            "remainTransientStoreBufferNumbs": "0",
            "runtime": _duration(self._world.wall_clock_ms() - self._boot_ms),
            "startAcceptSendRequestTimeStamp": "0",
            "timerDequeueTps": "0.0",
            "timerEnqueueTps": "0.0",
            **rates.per_s(),
            **self._pools(),
        }

    def _pools(self) -> dict[str, str]:
        sizes = dict.fromkeys(("send", "pull", "litePull", "query", "ack"), (0, 0))
        sizes["send"] = self._sends_in_flight(), self._options.sends_in_flight_max
        sizes["pull"] = sizes["litePull"] = 0, self._options.hold_count_max
        found = {"EndTransactionQueueSize": "0", "EndTransactionThreadPoolQueueCapacity": "0"}
        for name, (size, capacity) in sizes.items():
            found[f"{name}ThreadPoolQueueSize"] = str(size)
            found[f"{name}ThreadPoolQueueCapacity"] = str(capacity)
            found[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        return found

    async def _earliest_ms(self) -> int:
        """Returns the store time of the first message in the log, in ms since the epoch; -1 if there is none, or it is
        damaged."""
        found, _ = await find_record(self._store, self._store.log.min_offset)
        return -1 if found is None else found[1].store_timestamp_ms

    async def configuration(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_CONFIG (26): answers with every key and its current value, as a properties file."""
        version = java_json.dumps(self._topics.data_version).decode()
        return command.reply(ResponseCode.SUCCESS, None, {"version": version}, encode_config(self.describe()))

    async def configure(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """UPDATE_BROKER_CONFIG (25): answers SUCCESS if nothing would change, otherwise NO_PERMISSION: no key can be
        changed while the broker runs.

        RocketMQ accepts any key, but ignores unknown ones, and many others take effect only after a restart.
        """
        fault = change_fault("broker", self.describe(), command.body)
        return command.reply(ResponseCode.NO_PERMISSION if fault else ResponseCode.SUCCESS, fault or None)

    async def exchange_addresses(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """EXCHANGE_BROKER_HA_INFO (906): answers with the addresses of this master, for RocketMQ's replicas.

        Answers SUCCESS without addresses on a slave, or if the request states the master's address. RocketMQ's slaves
        adopt that address; halog's get their master from name servers.
        """
        request = parse_header(ExchangeRequest, command.ext_fields)
        if request.master_ha_address is not None or self._standing.is_slave:
            return command.reply(ResponseCode.SUCCESS)
        answer = ExchangeRequest(
            master_ha_address=self._options.ha_address,
            master_flush_offset=self._initial_max_offset,
            master_address=f"{self._options.host}:{self._options.port}",
        )
        return command.reply(ResponseCode.SUCCESS, ext_fields=answer.to_ext_fields())


def byte_text(size: int) -> str:
    """Formats a number of bytes like RocketMQ's MixAll.humanReadableByteCount: "512 B", "1.5 KiB"."""
    if size < 1024:
        return f"{size} B"
    units, amount = "KMGTPE", size / 1024
    step = 0
    while amount >= 1024 and step < len(units) - 1:
        amount /= 1024
        step += 1
    return f"{amount:.1f} {units[step]}iB"


def _duration(ms: int) -> str:
    minutes, seconds = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _text(value: bool) -> str:
    return "true" if value else "false"
