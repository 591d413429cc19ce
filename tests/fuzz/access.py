"""Access: the HA handshake, a peer that heals, ACL files, policies, gRPC signatures, the admin port's credentials."""

import random
from typing import Any

import trio
from starlette.requests import Request
from trio.testing import memory_stream_pair

from ha.acl import Right
from ha.acl.evaluation import CLUSTER, DENIED, GROUP, NO_MATCH, TOPIC, Policies, PolicyError, canonical
from ha.acl.grpc_signature import AUTHORIZATION, DATE_TIME, read_signature
from ha.acl.yaml_file import AclFileError, parse_acl_file
from ha.admin import AdminKey
from ha.admin.credentials import ACT_PATH, LOGIN_PATH, AdminGuard
from ha.admin.dashboard.forms import FIELD_COUNT_MAX
from ha.admin.dashboard.login import Login
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.access_bodies import AclInfo, PolicyInfo
from ha.protocol.acl import SigningKey
from ha.protocol.ha_frame import encode_transfer_header
from ha.protocol.ha_handshake import HELLO, HandshakeKey, encode_handshake_frame
from ha.replication.handshake import HandshakeOptions, authenticate_slave, authenticate_to_master
from ha.replication.heal_fetch import HealFetchError, fetch_range
from ha.replication.options import HAOptions
from tests.fuzz.harness import Harness
from tests.fuzz.replication import PAUSE, run_virtually, speak

SECRET = "a secret that no input knows"
TOKEN = "a token that no input knows"


def handshake(data: bytes) -> None:
    """Either side against a stranger who does not know the secret: never let in nor believed, always over in time."""
    if not data:
        return
    chance = random.Random(1)
    options = HandshakeOptions(key=HandshakeKey(SECRET), random_bytes=chance.randbytes, timeout_s=10.0)

    async def scenario() -> None:
        ours, theirs = memory_stream_pair()

        async def speak_and_leave() -> None:
            await speak(theirs, data[1:])
            await trio.sleep(5 if data[0] & 2 else 20)
            await theirs.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(speak_and_leave)
            with trio.fail_after(11):
                if data[0] & 1:
                    assert await authenticate_slave(ours, options) is not None
                else:
                    try:
                        assert await authenticate_to_master(ours, options)
                    except RemoteProtocolError:
                        pass
            nursery.cancel_scope.cancel()

    run_virtually(scenario)


def heal(data: bytes) -> None:
    """A range requested from a peer: exactly the requested bytes, or the one error, in bounded time."""
    if not data:
        return
    begin, end = ((0, 100), (100, 300), (4000, 4096))[data[0] % 3]

    async def scenario() -> None:
        async def connect(address: str) -> trio.abc.Stream:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(speak_on, theirs)
            return ours

        async def speak_on(stream: trio.abc.Stream) -> None:
            await speak(stream, data[1:])
            await trio.sleep(100)
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            with trio.fail_after(200):
                try:
                    found = await fetch_range(
                        "10.0.0.1:1", begin, end, connect=connect, options=HAOptions(), segment_size=4096
                    )
                except HealFetchError:
                    pass
                else:
                    assert 0 < len(found.raw) <= end - begin
                    assert (len(found.raw) < end - begin) is bool(found.trouble)
            nursery.cancel_scope.cancel()

    run_virtually(scenario)


def acl_files(data: bytes) -> None:
    """Any file: the one error, which quotes no value, or accounts and patterns that can be asked anything."""
    fault = ""
    try:
        found = parse_acl_file(data)
    except AclFileError as error:
        fault = str(error)
    assert "hidden-value" not in fault
    if fault:
        return
    assert not any("hidden-value" in warning for warning in found.warnings)
    for account in found.accounts:
        assert len(account.access_key) > 6
        assert "hidden-value" not in repr(account) or "hidden-value" in account.access_key
        for resource in ("T", "%RETRY%g", ""):
            account.may(resource, 4)
        account.white_hosts.matches("10.0.0.1")
    for pattern in found.global_white_hosts:
        for host in ("10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", "memory", "fe80::1%eth0"):
            pattern.matches(host)


def user_policies(data: bytes) -> None:
    """Any body of 3006: the one error, or policies that stay the same when written and parsed again."""
    try:
        info = java_json.read_as(AclInfo, data)
        entries = [canonical(entry) for policy in info.policies or () for entry in policy.entries or ()]
    except (RemoteProtocolError, PolicyError):
        return
    assert [canonical(entry) for entry in entries] == entries
    first = Policies([PolicyInfo(entries=entries)])
    again = java_json.read_as(AclInfo, java_json.dumps(AclInfo(policies=[PolicyInfo(entries=entries)])))
    second = Policies(again.policies or ())
    for kind, name in ((TOPIC, "T"), (GROUP, "g"), (CLUSTER, "C")):
        for host in ("10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", "memory", "fe80::1%eth0"):
            for actions in (Right.PUB, Right.SUB | Right.GET):
                found = first.denial(kind, name, actions, host)
                assert found in ("", NO_MATCH, DENIED)
                assert found == second.denial(kind, name, actions, host)


def grpc_signature(data: bytes) -> None:
    """Any metadata: the one error, or a signature that the known secret did not make."""
    authorization, _, date_time = data.decode("utf-8", "surrogateescape").partition("\n")
    try:
        signature = read_signature({AUTHORIZATION: authorization, DATE_TIME: date_time})
    except RemoteProtocolError:
        return
    assert len(signature.access_key) <= len(authorization)
    assert not signature.is_by(SigningKey(SECRET))


def admin_credentials(data: bytes) -> None:
    """Any headers, any cookie, and any form of the dashboard: refused, without an error."""
    guard = AdminGuard(AdminKey(TOKEN))
    assert guard.sessions is not None
    lines = data.split(b"\n")[:3]
    headers = [(b"authorization", line) for line in lines]
    headers += [(b"cookie", guard.sessions.cookie_name.encode() + b"=" + line) for line in lines]
    text = data.decode("utf-8", "surrogateescape")
    assert not guard.sessions.is_form_valid(text, text)
    login = Login(guard, lambda template, **shown: template)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def scenario() -> None:
        for method in ("GET", "POST"):
            scope: dict[str, Any] = {"type": "http", "method": method, "path": "/status", "headers": headers}
            assert guard._refusal(scope) is not None
            assert guard._refusal({**scope, "path": f"{ACT_PATH}/send"}) is not None
        form = {"type": "http", "method": "POST", "path": LOGIN_PATH, "headers": [], "query_string": data[:100]}
        assert (await login.submit(Request(form, receive))).status_code == 403
        assert (await login.form(Request(form, receive))).status_code == 200

    run_virtually(scenario)


def handshake_seeds() -> list[bytes]:
    """Strangers who know how it goes, but not the secret."""
    wrong = HandshakeKey("another secret")
    nonce = bytes(32)
    frame = encode_handshake_frame(nonce)
    answer = nonce + wrong.slave_proof(nonce, nonce)
    proof = encode_handshake_frame(wrong.master_proof(nonce, nonce))
    return [
        b"\x01" + HELLO + PAUSE + answer,
        b"\x01" + HELLO + PAUSE + bytes(64),
        b"\x01" + bytes(8),
        b"\x00" + frame + PAUSE + proof,
        b"\x02" + frame + PAUSE + frame,
        b"\x00" + encode_transfer_header(0, 0) + encode_transfer_header(100, 0),
    ]


def heal_seeds() -> list[bytes]:
    """Peers that have the bytes, have others, or have none."""
    found = []
    for number, (begin, end) in enumerate(((1, 100), (100, 300), (4000, 4096))):
        body = encode_transfer_header(begin, end - begin) + bytes(end - begin)
        answer = encode_transfer_header(0, 0) + encode_transfer_header(4096, 0)
        found += [bytes([number]) + text for text in (answer + PAUSE + body, body, PAUSE + body[:50], answer, PAUSE)]
        beat = encode_transfer_header(begin, 0)
        found.append(bytes([number]) + answer + PAUSE + beat + beat + body)
    return found


def policy_seeds() -> list[bytes]:
    """Policies of all kinds, and oddities."""
    return [
        b"""{"subject":"User:u","policies":[{"policyType":"Custom","entries":[
{"resource":"Topic:T","actions":["Pub","Sub"],"sourceIps":["10.0.0.0/8","::1"],"decision":"Allow"},
{"resource":"Topic:T*","actions":["All"],"decision":"Deny"},{"resource":"*","actions":["Get"],"decision":"allow"}]},
{"policyType":"Default","entries":[{"resource":"Group:*","actions":["sub"],"decision":"Allow"}]}]}""",
        b'{"policies":[{"entries":[{"resource":"Topic:a*b*","actions":["Pub"],"decision":"Deny"}]}]}',
        b'{"policies":[{"entries":[{"resource":"Cluster:C","actions":["Any"],"sourceIps":[" "],"decision":null}]}]}',
        b'{"policies":[{"entries":null},{"entries":[]}]}',
    ]


def signature_seeds() -> list[bytes]:
    """Of clients in several languages."""
    head, tail = b"MQv2-HMAC-SHA1 Credential=", b", SignedHeaders=x-mq-date-time, Signature="
    return [
        head + b"alice" + tail + b"0" * 40 + b"\n20261127T025722Z",
        head + b"alice//Rocketmq" + tail + b"AF" * 20 + b"\n20261127T025722Z",
        head + tail + b"\n20261127T025722Z",
        b"MQv2-HMAC-SHA1\n20261127T025722Z",
        b"\n",
    ]


def acl_seeds() -> list[bytes]:
    """A whole file, and oddities."""
    return [
        b"""globalWhiteRemoteAddresses:
- 10.10.103.*
- 192.168.0.{1,2}
accounts:
- accessKey: RocketMQ
  secretKey: hidden-value
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  groupPerms:
  - groupA=DENY
- accessKey: rocketmq2
  secretKey: 'hidden-value'
  whiteRemoteAddress: 192.168.1.*
  admin: true
""",
        b"accounts: [{accessKey: abcdefg, secretKey: hidden-value}]",
        b"accounts: &a [*a]\n",
        b"a: &x [1]\nb: *x\n",
        b"globalWhiteRemoteAddresses: ['*', '1::5-7f', '*:*:*:*:*:*:*:*', '1.2.1-9.*', 'a::{1,2}']",
        b"!!python/object/apply:os.system [x]",
        b"accounts:\n- accessKey: 0123456789\n  secretKey: 1e5\n",
    ]


def credential_seeds() -> list[bytes]:
    """Headers, cookies and forms of who does not know the token."""
    headers = [b"Bearer abc", b"Basic OnNlY3JldA==", b"Basic !!!", b"Bearer \xff", b"a\nb", b""]
    cookies = [b"9999999999." + b"0" * 16 + b"." + b"0" * 64, b"1..", "٣.x".encode(), "9999999999.x.ü".encode()]
    forms = [b"token=abc&next=/dashboard/topics", b"token=%ff%00&token=", b"&".join([b"a=1"] * (FIELD_COUNT_MAX + 1))]
    return [*headers, *cookies, *forms]


HARNESSES = {
    "ha_handshake": Harness(
        run=handshake,
        seeds=handshake_seeds,
        words=(HELLO, PAUSE, encode_handshake_frame(bytes(32))[:12], encode_transfer_header(0, 0)),
        size_max=300,
    ),
    "heal_fetch": Harness(
        run=heal,
        seeds=heal_seeds,
        words=(PAUSE, encode_transfer_header(100, 200), encode_transfer_header(1, 99), encode_transfer_header(1, 0)),
        size_max=1000,
    ),
    "acl_files": Harness(
        run=acl_files,
        seeds=acl_seeds,
        words=(
            b"accounts:",
            b"accessKey:",
            b"secretKey:",
            b"hidden-value",
            b"- ",
            b"topicPerms:",
            b"&a ",
            b"*a",
            b"{1,2}",
        ),
        size_max=2000,
        seconds_max=5.0,
    ),
    "user_policies": Harness(
        run=user_policies,
        seeds=policy_seeds,
        words=(
            b'"resource":"',
            b"Topic:",
            b"Group:",
            b"Cluster:",
            b"Any:",
            b'*"',
            b'"actions":["',
            b'"sourceIps":["',
            b"/8",
            b"::",
            b'"Deny"',
        ),
        size_max=1000,
    ),
    "grpc_signature": Harness(
        run=grpc_signature,
        seeds=signature_seeds,
        words=(b"Credential=", b"Signature=", b", ", b"=", b"/", b"\n"),
        size_max=300,
    ),
    "admin_credentials": Harness(
        run=admin_credentials,
        seeds=credential_seeds,
        words=(b"Basic ", b"Bearer ", b"==", b"token=", b"&next=/dashboard", b"9999999999.", b"%ff", b"\xd9\xa3"),
        size_max=300,
    ),
}
