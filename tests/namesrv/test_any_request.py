"""Whatever well-framed requests say, a name server answers each, and goes on answering good ones."""

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from ha.protocol.remoting import RemotingCommand
from tests.namesrv.brokers import compressed_body, open_site, register, register_body, route_of

CODES = st.sampled_from(
    [100, 101, 102, 103, 104, 105, 106, 205, 206, 216, 217, 219, 224, 304, 318, 319, 322, 327, 901, 904, 7]
)
NAMES = st.sampled_from(
    [
        "brokerName",
        "brokerAddr",
        "clusterName",
        "haServerAddr",
        "brokerId",
        "topic",
        "namespace",
        "key",
        "value",
        "compressed",
        "bodyCrc32",
        "heartbeatTimeoutMillis",
        "enableActingMaster",
        "cluster",
        "acceptStandardJsonOnly",
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        ["", "0", "1", "-1", "true", "false", "b0", "C", "T1", "10.0.0.1:10911", "9223372036854775807", "²"]
    ),
    st.text(max_size=5),
)
BODIES = st.one_of(
    st.binary(max_size=40),
    st.just(register_body(["T1", "T2"])),
    st.just(compressed_body(["T1", "T2"])),
    st.binary(max_size=8).map(lambda tail: compressed_body(["T1"])[:-4] + tail),
    st.sampled_from(
        [b'{"counter":null}', b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"t":{"perm":"x"}}}}', b"null"]
    ),
)
REQUESTS = st.builds(
    lambda code, fields, body, version, serialize_type: RemotingCommand(
        code, ext_fields=fields, body=body, version=version, serialize_type=serialize_type
    ),
    CODES,
    st.dictionaries(NAMES, VALUES, max_size=8),
    BODIES,
    st.sampled_from([0, 317, 479]),
    st.sampled_from([0, 1]),
)


@settings(max_examples=100)
@given(requests=st.lists(REQUESTS, max_size=6))
def test_every_request_gets_one_answer(requests: list[RemotingCommand]) -> None:
    async def main() -> None:
        async with open_site() as site:
            peer = site.connect()
            for number, request in enumerate(requests):
                request.opaque = number
                answer = await peer.ask(request)
                assert (answer.opaque, answer.serialize_type) == (number, request.serialize_type)
                assert answer.code in (0, 1, 3, 16, 17, 22)
            good = site.connect()
            assert (await good.ask(register(["G1", "G2"], name="good", address="g:1", cluster="G"))).code == 0
            assert await route_of(good, "G1") is not None
            for code in (106, 206):
                assert (await good.ask(RemotingCommand(code))).code == 0

    trio.run(main)
