"""The route table under any order of registrations and ends: what belongs together stays together."""

from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.namesrv.registrations import TopicQueues
from ha.namesrv.routes import Registration, RouteTable
from ha.protocol.bodies import DataVersion, QueueData

NAMES, CLUSTERS, ADDRESSES, TOPICS = ("b0", "b1"), ("C", "D"), ("h:0", "h:1", "h:2"), ("T0", "T1", "T2")


def registration(topics: set[str], **fields: Any) -> Registration:
    queues = {name: TopicQueues() for name in topics}
    return Registration(topics=queues, ha_address="h:9", timeout_s=100.0, **fields)


REGISTRATIONS = st.builds(
    registration,
    st.sets(st.sampled_from(TOPICS)),
    cluster_name=st.sampled_from(CLUSTERS),
    broker_name=st.sampled_from(NAMES),
    broker_id=st.integers(0, 2),
    broker_address=st.sampled_from(ADDRESSES),
    data_version=st.builds(DataVersion, counter=st.integers(0, 2), state_version=st.integers(0, 2)),
    acting_master=st.sampled_from((None, False, True)),
    channel=st.integers(0, 1),
)
OTHERS = st.one_of(
    st.tuples(st.just("unregister"), st.sampled_from(CLUSTERS), st.sampled_from(NAMES), st.sampled_from(ADDRESSES)),
    st.tuples(st.just("channel_closed"), st.integers(0, 1)),
    st.tuples(st.just("expire"), st.integers(0, 200).map(float)),
    st.tuples(st.just("delete_topic"), st.sampled_from(TOPICS), st.sampled_from((None, *CLUSTERS))),
    st.tuples(st.just("add_queues"), st.sampled_from(TOPICS), st.just([QueueData(broker_name="b1")])),
)


def check(table: RouteTable) -> None:
    live: set[tuple[str, str]] = {(broker.cluster_name, broker.broker_name) for broker in table.brokers()}
    listed = {(cluster, name) for cluster, names in table.clusters().items() for name in names}
    info = table.cluster_info()
    assert listed == live
    assert {name for _, name in live} == info.broker_addr_table.keys()
    addresses = {(broker.broker_name, broker.address) for broker in table.brokers()}
    for name, group in info.broker_addr_table.items():
        assert group.broker_addrs
        assert {(name, address) for address in group.broker_addrs.values()} <= addresses
        assert (group.cluster, name) in live
    pairs = 0
    for topic in table.topics():
        route: Any = table.route(topic)
        names = [each.broker_name for each in route.queue_datas]
        assert names == [each.broker_name for each in route.broker_datas] != []
        assert table.group_count(topic) == len(names)
        pairs += len(names)
    assert table._queue_entry_count == pairs
    of_clusters = {topic for cluster in CLUSTERS for topic in table.topics_of_cluster(cluster)}
    assert of_clusters == set(table.topics())


@settings(max_examples=300)
@given(st.lists(st.one_of(REGISTRATIONS, OTHERS), max_size=12))
def test_the_tables_agree_after_every_change(changes: list[Any]) -> None:
    table = RouteTable(brokers_max=4, topics_max=3, queue_entries_max=5)
    for now, change in enumerate(changes):
        with suppress(RemoteProtocolError):
            if isinstance(change, Registration):
                table.register(change, float(now))
            else:
                name, *arguments = change
                getattr(table, name)(*arguments)
        check(table)
    for channel in (0, 1):
        table.channel_closed(channel)
    assert (table.broker_count, table.topic_count, table.clusters()) == (0, 0, {})
    assert not table.cluster_info().broker_addr_table
