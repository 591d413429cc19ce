"""The registered brokers of a name server, and the queues of their topics.

No sockets and no clock: callers pass `now` in seconds of the trio clock. The rules are those of RouteInfoManager in
RocketMQ 5.x; methods document differences.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.bodies import BrokerData, ClusterInfo, DataVersion, QueueData, TopicRouteData
from ha.protocol.codes import MASTER_ID, Permission

from .registrations import Topics

NAME_LENGTH_MAX = 255
"""Maximum number of characters in the name of a cluster, broker or topic, and in an address."""

DUPLICATES_MAX = 256
"""Maximum number of duplicate brokers that are remembered."""

DUPLICATE_S = 120.0
"""Time for which a duplicate is remembered, in seconds; brokers register every 30 s."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's REGISTER_BROKER request."""

    cluster_name: str
    broker_name: str
    broker_id: int
    broker_address: str
    """Address at which clients reach the broker, as host:port."""
    ha_address: str
    """Address at which slaves reach the broker, as host:port."""
    data_version: DataVersion
    topics: Topics
    """The broker's topics; their names have at most NAME_LENGTH_MAX characters."""
    timeout_s: float
    """Maximum time in seconds until the next registration or heartbeat; the broker is dropped after it."""
    acting_master: bool | None = None
    """Whether the slave with the lowest ID may act as a read-only master; None for brokers without this feature
    (4.9)."""
    channel: Hashable
    """Connection of the registration."""


class MasterAddresses(msgspec.Struct, frozen=True):
    """Addresses of a slave's master as host:port; None if no master is registered."""

    master_address: str | None = None
    ha_address: str | None = None


class LiveBroker(msgspec.Struct, kw_only=True):
    """A registered broker."""

    cluster_name: str
    broker_name: str
    broker_id: int
    address: str
    ha_address: str
    data_version: DataVersion
    timeout_s: float
    deadline: float
    """Time on the trio clock at which the broker is dropped, unless it registers again or sends a heartbeat."""
    channel: Hashable
    """Connection of its last registration or heartbeat; when it closes, the broker is removed."""


class Duplicate(msgspec.Struct, frozen=True, kw_only=True):
    """Two brokers with the same name and ID, of which the later replaced the earlier."""

    broker_name: str
    broker_id: int
    address: str
    """host:port of the broker that registered later; `other_address` is that of the earlier one."""
    other_address: str
    seen_at: float
    """Time of the later registration, on the trio clock."""


class _Group(msgspec.Struct):
    """The brokers that are registered under one broker name: a master and its slaves."""

    cluster_name: str
    replicas: dict[int, LiveBroker] = {}
    """The registered brokers of the group, by broker id."""
    acting_master: bool = False
    topics: dict[str, None] = {}
    """The topics of which the group has queues."""


def _state_version(broker: Registration | LiveBroker) -> int:
    return broker.data_version.state_version or 0


def _master_of(broker: Registration, group: _Group) -> MasterAddresses:
    master = group.replicas.get(MASTER_ID)
    if master is None or broker.broker_id == MASTER_ID or master.cluster_name != broker.cluster_name:
        return MasterAddresses()
    return MasterAddresses(master.address, master.ha_address)


class RouteTable:
    """The registered brokers and their topics, with limits on their numbers."""

    def __init__(self, *, brokers_max: int, topics_max: int, queue_entries_max: int) -> None:
        self._brokers_max = brokers_max
        self._topics_max = topics_max
        self._queue_entries_max = queue_entries_max
        self._groups: dict[str, _Group] = {}
        self._clusters: dict[str, dict[str, None]] = {}
        self._queues: dict[str, dict[str, QueueData]] = {}
        """Topic -> broker name -> queues."""
        self._queue_entry_count = 0
        """Number of pairs of a topic and a broker name in `_queues`."""
        self._live: dict[tuple[str, str], LiveBroker] = {}
        self._duplicates: OrderedDict[tuple[str, int], Duplicate] = OrderedDict()

    # Registration

    def register(self, broker: Registration, now: float) -> MasterAddresses:
        """Registers a broker, in place of its earlier registration. Returns the addresses of its master; both are None
        for a master, for a slave without a registered master in its cluster, and for a broker that is ignored.

        A broker is ignored, and its earlier registration removed, if another address is registered under its name and
        ID with a newer state version.

        Raises RemoteProtocolError, and changes nothing, if a limit is exceeded, or if a registration with a single
        topic, which is an update of that topic, can't be applied: no broker is registered under the name and ID, or the
        broker has changed its name or cluster. The broker then keeps the routes of its earlier registration until it
        registers all its topics, which brokers do every 30 s. RocketMQ 5 accepts the update if only the cluster has
        changed.
        """
        self._check_bounds(broker)
        key = (broker.cluster_name, broker.broker_address)
        before = self._live.get(key)
        # Registrations from before the broker changed its cluster. RocketMQ 5 keeps them, and removes the broker's
        # route when one of them ends.
        outdated = self._in_other_clusters(broker)
        if before is not None and before.broker_name != broker.broker_name:
            # The broker was renamed. RocketMQ keeps the address under the old name as well until a restart.
            outdated.append(before)
            before = None
        if len(broker.topics) == 1 and (outdated or self._holder(broker) is None):
            raise RemoteProtocolError("register broker failed")
        for each in outdated:
            self._remove(each)
        group = self._groups.get(broker.broker_name)
        holder = self._holder(broker)
        replaced = None if holder is None or holder.address == broker.broker_address else holder
        if replaced is not None and _state_version(replaced) > _state_version(broker):
            if before is not None:
                self._remove(before)
            return MasterAddresses()

        if group is None:
            group = self._groups[broker.broker_name] = _Group(broker.cluster_name)
        self._clusters.setdefault(broker.cluster_name, {})[broker.broker_name] = None
        group.acting_master = bool(broker.acting_master)
        if before is not None:
            del group.replicas[before.broker_id]  # the broker may have changed its role
        self._live[key] = group.replicas[broker.broker_id] = LiveBroker(
            cluster_name=broker.cluster_name,
            broker_name=broker.broker_name,
            broker_id=broker.broker_id,
            address=broker.broker_address,
            ha_address=broker.ha_address,
            data_version=broker.data_version,
            timeout_s=broker.timeout_s,
            deadline=now + broker.timeout_s,
            channel=broker.channel,
        )
        if replaced is not None:
            self._forget(replaced, group)
            self._note_duplicate(broker, replaced, now)
        is_changed = holder is None or before is None or before.data_version != broker.data_version
        self._update_queues(broker, group, is_changed=is_changed)
        return _master_of(broker, group)

    def _holder(self, broker: Registration) -> LiveBroker | None:
        """Returns the broker that is registered under the name and ID of `broker`; None if there is none."""
        group = self._groups.get(broker.broker_name)
        return None if group is None else group.replicas.get(broker.broker_id)

    def _in_other_clusters(self, broker: Registration) -> list[LiveBroker]:
        """Returns the registrations of the same broker name and address in other clusters."""
        return [
            live
            for cluster_name in self._clusters
            if cluster_name != broker.cluster_name
            and (live := self._live.get((cluster_name, broker.broker_address))) is not None
            and live.broker_name == broker.broker_name
        ]

    def _note_duplicate(self, broker: Registration, holder: LiveBroker, now: float) -> None:
        """Records that `broker` replaced `holder`, unless `broker` has a newer state version than `holder` (a new
        term)."""
        if _state_version(broker) > _state_version(holder):
            return
        key = (broker.broker_name, broker.broker_id)
        self._duplicates.pop(key, None)
        self._duplicates[key] = Duplicate(
            broker_name=broker.broker_name,
            broker_id=broker.broker_id,
            address=broker.broker_address,
            other_address=holder.address,
            seen_at=now,
        )
        if len(self._duplicates) > DUPLICATES_MAX:
            self._duplicates.popitem(last=False)

    def _check_bounds(self, broker: Registration) -> None:
        if len(self._live) >= self._brokers_max and (broker.cluster_name, broker.broker_address) not in self._live:
            raise RemoteProtocolError(f"register broker failed: already {len(self._live)} brokers")
        longest = max(map(len, (broker.cluster_name, broker.broker_name, broker.broker_address, broker.ha_address)))
        if longest > NAME_LENGTH_MAX:
            raise RemoteProtocolError(f"register broker failed: a name of {longest} characters")
        group = self._groups.get(broker.broker_name)
        unheld = broker.topics.keys() - (group.topics if group is not None else {}).keys()
        held = self._queue_entry_count
        if held + len(unheld) > self._queue_entries_max:
            raise RemoteProtocolError(
                f"register broker failed: already {held} topics of brokers, and {len(unheld)} more are beyond "
                f"{self._queue_entries_max}"
            )
        new = sum(topic not in self._queues for topic in unheld)
        if len(self._queues) + new > self._topics_max:
            raise RemoteProtocolError(f"register broker failed: already {len(self._queues)} topics")

    def _update_queues(self, broker: Registration, group: _Group, *, is_changed: bool) -> None:
        """Updates the queues of the group if this broker is its master, or if no master is registered and this broker
        is the replica with the lowest ID and supports acting as master."""
        is_master = broker.broker_id == MASTER_ID
        is_prime_slave = broker.acting_master is not None and not is_master and broker.broker_id == min(group.replicas)
        if not is_master and not is_prime_slave:
            return
        for name, topic in broker.topics.items():
            if not is_changed and name in group.topics:
                continue
            perm = topic.perm
            if is_prime_slave and group.acting_master:
                perm &= ~Permission.WRITE
            queues = QueueData(
                broker_name=broker.broker_name,
                read_queue_nums=topic.read_queue_nums,
                write_queue_nums=topic.write_queue_nums,
                perm=perm,
                topic_sys_flag=topic.topic_sys_flag,
            )
            self._set_queues(name, group, queues)

    def _set_queues(self, topic: str, group: _Group, queues: QueueData) -> None:
        if topic not in group.topics:
            group.topics[topic] = None
            self._queue_entry_count += 1
        self._queues.setdefault(topic, {})[queues.broker_name] = queues

    def _drop_queues(self, topic: str, broker_name: str) -> None:
        """Removes a broker's queues of a topic, if it has any."""
        by_broker = self._queues.get(topic, {})
        if by_broker.pop(broker_name, None) is None:
            return
        self._queue_entry_count -= 1
        del self._groups[broker_name].topics[topic]
        if not by_broker:
            del self._queues[topic]

    # Removal

    def unregister(self, cluster_name: str, broker_name: str, address: str) -> bool:
        """Removes a broker; returns whether it was registered."""
        broker = self._live.get((cluster_name, address))
        if broker is None or broker.broker_name != broker_name:
            return False
        self._remove(broker)
        return True

    def channel_closed(self, channel: Hashable) -> list[LiveBroker]:
        """Removes and returns the brokers whose last registration or heartbeat used `channel`."""
        return self._remove_all([broker for broker in self._live.values() if broker.channel is channel])

    def expire(self, now: float) -> list[LiveBroker]:
        """Removes and returns the brokers whose deadline has passed."""
        return self._remove_all([broker for broker in self._live.values() if broker.deadline <= now])

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of a broker, on the trio clock; infinity if no broker is registered."""
        return min((broker.deadline for broker in self._live.values()), default=math.inf)

    def _remove_all(self, brokers: list[LiveBroker]) -> list[LiveBroker]:
        for broker in brokers:
            self._remove(broker)
        return brokers

    def _remove(self, broker: LiveBroker) -> None:
        group = self._groups[broker.broker_name]
        del group.replicas[broker.broker_id]
        self._forget(broker, group)
        if not group.replicas:
            for topic in list(group.topics):
                self._drop_queues(topic, broker.broker_name)
            del self._groups[broker.broker_name]
        elif group.acting_master and MASTER_ID not in group.replicas:
            self.set_write_permission(broker.broker_name, is_on=False)

    def _forget(self, broker: LiveBroker, group: _Group) -> None:
        """Removes the registration of a broker that left its group, and the group from a cluster where it has no
        replica left."""
        cluster_name = broker.cluster_name
        del self._live[cluster_name, broker.address]
        if any(each.cluster_name == cluster_name for each in group.replicas.values()):
            return
        names = self._clusters[cluster_name]
        del names[broker.broker_name]
        if not names:
            del self._clusters[cluster_name]
        if group.cluster_name == cluster_name:
            group.cluster_name = next((each.cluster_name for each in group.replicas.values()), "")

    # Heartbeats

    def touch(self, cluster_name: str, address: str, channel: Hashable, now: float) -> None:
        """Extends a broker's deadline, if it is registered. From then on, the broker is removed when `channel` closes
        instead of its earlier connection, which may already be lost. RocketMQ removes it when the earlier one
        closes."""
        broker = self._live.get((cluster_name, address))
        if broker is not None:
            broker.deadline = now + broker.timeout_s
            broker.channel = channel

    def data_version(self, cluster_name: str, address: str) -> DataVersion | None:
        """Returns the version of a broker's topics; None if it is not registered."""
        broker = self._live.get((cluster_name, address))
        return None if broker is None else broker.data_version

    # Queries

    def route(self, topic: str) -> TopicRouteData | None:
        """Returns the queues of a topic and their brokers; None if there are no brokers."""
        by_broker = self._queues.get(topic, {})
        brokers = [self._broker_data(name) for name in by_broker if name in self._groups]
        if not brokers:
            return None
        return TopicRouteData(broker_datas=brokers, queue_datas=list(by_broker.values()))

    def cluster_info(self) -> ClusterInfo:
        """Returns all brokers, by name and by cluster."""
        return ClusterInfo(
            broker_addr_table={name: self._broker_data(name) for name in self._groups},
            cluster_addr_table={cluster: list(names) for cluster, names in self._clusters.items()},
        )

    def group(self, broker_name: str) -> BrokerData | None:
        """Returns the replicas of a broker name; None if none is registered."""
        return self._broker_data(broker_name) if broker_name in self._groups else None

    def duplicates(self, now: float) -> list[Duplicate]:
        """Returns the duplicates of the last DUPLICATE_S seconds, the newest last."""
        return [each for each in self._duplicates.values() if now - each.seen_at < DUPLICATE_S]

    @property
    def broker_count(self) -> int:
        """Number of registered brokers."""
        return len(self._live)

    @property
    def topic_count(self) -> int:
        """Number of topics."""
        return len(self._queues)

    def group_count(self, topic: str) -> int:
        """Returns the number of broker names that have queues of a topic."""
        return len(self._queues.get(topic, ()))

    def topics(self) -> list[str]:
        """Returns all topics."""
        return list(self._queues)

    def topics_of_cluster(self, cluster_name: str) -> list[str]:
        """Returns the topics of which a cluster's brokers have queues."""
        topics: dict[str, None] = {}
        for name in self._clusters.get(cluster_name, {}):
            topics.update(self._groups[name].topics)
        return list(topics)

    def clusters(self) -> dict[str, list[str]]:
        """Returns broker names by cluster."""
        return {cluster: list(names) for cluster, names in self._clusters.items()}

    def brokers(self) -> Iterable[LiveBroker]:
        """Returns the registered brokers."""
        return self._live.values()

    def _broker_data(self, broker_name: str) -> BrokerData:
        group = self._groups[broker_name]
        return BrokerData(
            cluster=group.cluster_name,
            broker_name=broker_name,
            broker_addrs={broker_id: each.address for broker_id, each in sorted(group.replicas.items())},
            enable_acting_master=group.acting_master,
        )

    # Changes by tools

    def set_write_permission(self, broker_name: str, *, is_on: bool) -> int:
        """Removes write permission from the queues of a broker name, or gives them read and write permission (`is_on`),
        until the broker's topics change or it restarts. Returns the number of topics; 0 if the name is not
        registered."""
        group = self._groups.get(broker_name)
        if group is None:
            return 0
        for topic in group.topics:
            queues = self._queues[topic][broker_name]
            perm = Permission.READ | Permission.WRITE if is_on else queues.perm & ~Permission.WRITE
            self._queues[topic][broker_name] = msgspec.structs.replace(queues, perm=perm)
        return len(group.topics)

    def add_queues(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Adds the queues of a topic up to the first whose broker is not registered. Raises RemoteProtocolError if a
        limit is exceeded.
        """
        by_broker = self._queues.get(topic, {})
        known = {}
        for each in queues:
            if each.broker_name not in self._groups:
                break
            known[each.broker_name] = each
        if not known:
            return
        if len(topic) > NAME_LENGTH_MAX:
            raise RemoteProtocolError(f"register topic failed: a name of {len(topic)} characters")
        held = self._queue_entry_count
        if held + len(known.keys() - by_broker.keys()) > self._queue_entries_max:
            raise RemoteProtocolError(f"register topic failed: already {held} topics of brokers")
        if topic not in self._queues and len(self._queues) >= self._topics_max:
            raise RemoteProtocolError(f"register topic failed: already {len(self._queues)} topics")
        for name, each in known.items():
            self._set_queues(topic, self._groups[name], each)

    def delete_topic(self, topic: str, cluster_name: str | None = None) -> bool:
        """Deletes a topic's queues in one cluster or in all, until a broker registers them again. Returns whether there
        were any."""
        names = list(self._queues.get(topic, {}))
        if cluster_name is not None:
            names = [name for name in names if name in self._clusters.get(cluster_name, {})]
        for name in names:
            self._drop_queues(topic, name)
        return bool(names)
