"""Selects the module that decodes an archive's columns from message bodies of a format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import pyarrow as pa


class BodyFormat(Protocol):
    """The interface of a module that decodes bodies of one format."""

    @property
    def ACCEPTED(self) -> str:  # noqa: N802 - a constant of the module
        """Describes a valid schema of this format, for error messages."""

    def stored_schema(self, given: str | tuple[bytes, str], /) -> dict[str, Any]:
        """Returns the user's schema in the form that the archive's manifest stores. Raises ValueError if it is invalid;
        OptionError if a required package is not installed."""

    def columns(self, stored: dict[str, Any], /) -> pa.StructType:
        """Returns the columns of a stored schema. Raises ValueError for a type that no column can have."""

    def decoder(self, stored: dict[str, Any], /) -> Callable[[bytes], Any]:
        """Returns a function that returns the values of a body by column, or None if the body can't be decoded.

        Raises OptionError if a required package is not installed.
        """


def body_format(name: Literal["json", "avro", "protobuf"]) -> BodyFormat:
    """Returns the module for the format `name`. Imports only this one, to keep the start of worker processes short."""
    if name == "avro":
        from ha.spark.jobs.archive import avro_bodies

        return avro_bodies
    if name == "protobuf":
        from ha.spark.jobs.archive import protobuf_bodies

        return protobuf_bodies
    from ha.spark.jobs.archive import json_bodies

    return json_bodies
