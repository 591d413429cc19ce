"""The schema, against the descriptors that Apache's Python client ships."""

from __future__ import annotations

from typing import Any

import pytest
from rocketmq.grpc_protocol import definition_pb2, service_pb2

from ha.errors import RemoteProtocolError
from ha.proxy import messages

THEIRS: dict[str, Any] = {
    **definition_pb2.DESCRIPTOR.message_types_by_name,
    **service_pb2.DESCRIPTOR.message_types_by_name,
}
ENUM = 14


def shape(field: Any) -> tuple[object, ...]:
    """Everything about a field that matters on the wire or to its user. Enums are integers here."""
    kind = 5 if field.type == ENUM else field.type
    message = field.message_type.full_name if field.message_type is not None else None
    return field.name, field.number, kind, field.is_repeated, field.has_presence, message


@pytest.mark.parametrize("name", messages.CLASSES)
def test_fields_are_those_of_the_clients(name: str) -> None:
    ours, theirs = messages.CLASSES[name].DESCRIPTOR, THEIRS[name]
    assert [shape(field) for field in ours.fields] == [shape(field) for field in theirs.fields]
    groups = [
        sorted(oneof.name + ":" + field.name for oneof in each.oneofs for field in oneof.fields)
        for each in (ours, theirs)
    ]
    assert groups[0] == groups[1]


@pytest.mark.parametrize(
    ("enum", "name"),
    [
        (messages.Code, "Code"),
        (messages.MessageType, "MessageType"),
        (messages.ClientType, "ClientType"),
        (messages.Permission, "Permission"),
    ],
)
def test_values_of_enums(enum: Any, name: str) -> None:
    values = definition_pb2.DESCRIPTOR.enum_types_by_name[name].values_by_number
    for member in enum:
        assert values[member.value].name.removeprefix("MESSAGE_TYPE_") == member.name


def test_values_of_constants() -> None:
    assert (messages.TAG, messages.SQL) == (definition_pb2.TAG, definition_pb2.SQL)
    assert messages.MD5 == definition_pb2.MD5
    assert (messages.IDENTITY, messages.GZIP) == (definition_pb2.IDENTITY, definition_pb2.GZIP)
    assert (messages.COMMIT, messages.ROLLBACK) == (definition_pb2.COMMIT, definition_pb2.ROLLBACK)
    assert messages.SERVER_CHECK == definition_pb2.SOURCE_SERVER_CHECK


def test_malformed_messages() -> None:
    with pytest.raises(RemoteProtocolError, match="not a SendMessageRequest"):
        messages.parse("SendMessageRequest", b"\xff\xff\xff")


@pytest.mark.parametrize("milliseconds", [0, 1, 999, 1000, 1_795_705_617_818])
def test_times(milliseconds: int) -> None:
    message = messages.make("SystemProperties")
    messages.set_milliseconds(message.born_timestamp, milliseconds)
    assert messages.milliseconds(message.born_timestamp) == milliseconds
