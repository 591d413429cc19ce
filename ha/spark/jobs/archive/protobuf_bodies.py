"""Decodes Protobuf bodies by a compiled descriptor set and the name of a message.

A body is one message, and nothing else. Fields that the descriptor does not have are skipped, as always in Protobuf.
A field that is not set is null if Protobuf can tell that it is not set (messages, members of a oneof, and scalars that
are optional); otherwise it has its default value, such as 0.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ha.arrow.schema import TIMESTAMP

ACCEPTED = "FILE:MESSAGE, where FILE is written by protoc --include_imports --descriptor_set_out=FILE"
_SCALARS = {
    FieldDescriptor.TYPE_BOOL: pa.bool_(),
    FieldDescriptor.TYPE_INT32: pa.int32(),
    FieldDescriptor.TYPE_SINT32: pa.int32(),
    FieldDescriptor.TYPE_SFIXED32: pa.int32(),
    FieldDescriptor.TYPE_UINT32: pa.int64(),
    FieldDescriptor.TYPE_FIXED32: pa.int64(),
    FieldDescriptor.TYPE_INT64: pa.int64(),
    FieldDescriptor.TYPE_SINT64: pa.int64(),
    FieldDescriptor.TYPE_SFIXED64: pa.int64(),
    FieldDescriptor.TYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.TYPE_FIXED64: pa.decimal128(20, 0),
    FieldDescriptor.TYPE_FLOAT: pa.float32(),
    FieldDescriptor.TYPE_DOUBLE: pa.float64(),
    FieldDescriptor.TYPE_STRING: pa.string(),
    FieldDescriptor.TYPE_BYTES: pa.binary(),
}
"""Protobuf's scalar types -> Arrow's. Spark has no unsigned integers, so these have the next larger type."""
_WRAPPERS = "google/protobuf/wrappers.proto"
_TIMESTAMP_SECONDS = range(-62_135_596_800, 253_402_300_800)
"""Seconds since 1970 of the years 1 to 9999"""
_DURATION_SECONDS = range(-315_576_000_000, 315_576_000_001)
_Convert = Callable[[Any], Any] | None
"""Converts a Protobuf value to the value for Arrow; None if no conversion is needed. Raises ValueError if it does not
fit."""


def stored_schema(given: str | tuple[bytes, str]) -> dict[str, Any]:
    """Returns the schema to store; see BodyFormat. `given` is a descriptor set and the full name of a message in it.

    The result has the files that the message needs, without services and documentation, as base64.
    """
    if isinstance(given, str):
        raise ValueError("it names no message")
    descriptor_set, message = given
    try:
        files = {file.name: file for file in FileDescriptorSet.FromString(descriptor_set).file}
        root = _descriptor(list(files.values()), message)
    except DecodeError:
        raise ValueError("the file is no descriptor set") from None
    except KeyError:
        raise ValueError(f"the descriptor set has no message {message}") from None
    except TypeError as error:
        raise ValueError(f"the descriptor set is not complete: {error}") from None
    needed = _with_imports(root.file.name, files)
    kept = FileDescriptorSet(file=[file for name, file in files.items() if name in needed])
    for file in kept.file:
        file.ClearField("source_code_info")
        file.ClearField("service")
    return {"message": message, "files": b64encode(kept.SerializeToString(deterministic=True)).decode()}


def columns(stored: dict[str, Any]) -> pa.StructType:
    """Returns the columns of a stored schema; see BodyFormat."""
    arrow, _ = _message_type(_stored_descriptor(stored), ())
    return arrow


def decoder(stored: dict[str, Any]) -> Callable[[bytes], Any]:
    """Returns a function that decodes bodies of a stored schema; see BodyFormat."""
    descriptor = _stored_descriptor(stored)
    parse = GetMessageClass(descriptor).FromString
    _, convert = _message_type(descriptor, ())

    def decoded(body: bytes) -> Any:
        try:
            return convert(parse(body))
        except (DecodeError, ValueError):
            return None

    return decoded


def _stored_descriptor(stored: dict[str, Any]) -> Descriptor:
    files = FileDescriptorSet.FromString(b64decode(stored["files"]))
    return _descriptor(list(files.file), stored["message"])


def _descriptor(files: list[FileDescriptorProto], message: str) -> Descriptor:
    """Returns the descriptor of `message`. Raises KeyError if there is none, TypeError if an imported file is
    missing."""
    pool = DescriptorPool()
    for file in files:  # protoc writes imported files first
        pool.AddSerializedFile(file.SerializeToString())
    return pool.FindMessageTypeByName(message)


def _with_imports(name: str, files: dict[str, FileDescriptorProto]) -> set[str]:
    found: set[str] = set()
    pending = [name]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += files[name].dependency
    return found


def _message_type(message: Descriptor, within: tuple[str, ...]) -> tuple[pa.DataType, Callable[[Any], Any]]:
    """Returns the Arrow type of a message, and a function that converts a message to a value of this type.

    `within`: full names of the messages that contain it. Raises ValueError if this message, or one in it, contains
    itself or has no fields.
    """
    name = message.full_name
    if name == "google.protobuf.Timestamp":
        return TIMESTAMP, _timestamp
    if name == "google.protobuf.Duration":
        return pa.int64(), _duration
    if message.file.name == _WRAPPERS:
        arrow, _ = _value_type(message.fields_by_name["value"], within)
        return arrow, lambda wrapper: wrapper.value
    if name in within:
        raise ValueError(f"{name} contains itself")
    if not message.fields:
        raise ValueError(f"{name} has no fields")
    proto = DescriptorProto()
    message.CopyToProto(proto)
    repeated = {field.number for field in proto.field if field.label == FieldDescriptorProto.LABEL_REPEATED}
    types: list[tuple[str, pa.DataType]] = []
    getters: list[tuple[str, Callable[[Any], Any]]] = []
    for field in message.fields:
        arrow, get = _field_type(field, field.number in repeated, (*within, name))
        types.append((field.name, arrow))
        getters.append((field.name, get))
    return pa.struct(types), lambda found: {field_name: get(found) for field_name, get in getters}


def _field_type(
    field: FieldDescriptor, is_repeated: bool, within: tuple[str, ...]
) -> tuple[pa.DataType, Callable[[Any], Any]]:
    """Returns the Arrow type of a field, and a function that returns the field's converted value in a message.

    Raises ValueError as in `_message_type`.
    """
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, _ = _value_type(field.message_type.fields_by_name["key"], within)
        value, convert = _value_type(field.message_type.fields_by_name["value"], within)
        return pa.map_(key, value), lambda found: [
            (each, of_each if convert is None else convert(of_each)) for each, of_each in getattr(found, name).items()
        ]
    arrow, convert = _value_type(field, within)
    if is_repeated:
        return pa.list_(arrow), lambda found: [
            item if convert is None else convert(item) for item in getattr(found, name)
        ]

    def get(found: Any) -> Any:
        value = getattr(found, name)
        return value if convert is None else convert(value)

    return arrow, (lambda found: get(found) if found.HasField(name) else None) if field.has_presence else get


def _value_type(field: FieldDescriptor, within: tuple[str, ...]) -> tuple[pa.DataType, _Convert]:
    if field.message_type is not None:
        return _message_type(field.message_type, within)
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return pa.string(), lambda number: names.get(number) or str(number)
    return _SCALARS[field.type], None


def _timestamp(found: Any) -> int:
    """Converts a Timestamp to µs since 1970, rounded down. Raises ValueError if it is out of range."""
    if found.seconds not in _TIMESTAMP_SECONDS or not 0 <= found.nanos < 1_000_000_000:
        raise ValueError("no valid Timestamp")
    return int(found.seconds * 1_000_000 + found.nanos // 1000)


def _duration(found: Any) -> int:
    """Converts a Duration to µs, rounded down. Raises ValueError if it is out of range."""
    if found.seconds not in _DURATION_SECONDS or abs(found.nanos) >= 1_000_000_000 or found.seconds * found.nanos < 0:
        raise ValueError("no valid Duration")
    return int(found.seconds * 1_000_000 + found.nanos // 1000)
