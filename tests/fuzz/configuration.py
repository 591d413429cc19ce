"""What an operator or user writes: properties files, and the JSON in options of the data source."""

import tempfile
from pathlib import Path
from typing import Literal, TypeVar

from ha.config import Config, NameServerConfig, load_config
from ha.config.loading import render
from ha.config.properties_file import parse_properties
from ha.errors import ConfigError, OptionError
from ha.spark.sink.control import decode_control
from ha.spark.source.options import parse_any, parse_options
from tests.fuzz.harness import Harness
from tests.fuzz.remoting import EQUALS, FIELD, fields_of, to_fields

C = TypeVar("C", Config, NameServerConfig)


def configuration(data: bytes) -> None:
    """Any file: ConfigError or a configuration; what it renders to is that configuration again."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        parse_properties(text)
    except ValueError:
        pass
    with tempfile.NamedTemporaryFile(suffix=".conf") as file:
        path = Path(file.name)
        path.write_bytes(data)
        check(Config, path)
        path.write_bytes(data)
        check(NameServerConfig, path)


def check(struct: type[C], path: Path) -> None:
    """Load a file; if that works, load what the configuration renders to."""
    try:
        config = load_config(struct, file=path).config
    except ConfigError:
        return
    path.write_text(render(config))
    assert load_config(struct, file=path).config == config


def spark_options(data: bytes) -> None:
    """Any options of the data source: OptionError or options; and any body as a record of the sink's commit topic."""
    decode_control(data)
    given = fields_of(data)
    kinds: tuple[Literal["batch", "stream"], ...] = ("batch", "stream")
    for kind in kinds:
        try:
            parse_options(given, kind)
        except OptionError:
            pass
    try:
        parse_any(given)
    except OptionError:
        pass


def configuration_seeds() -> list[bytes]:
    """The defaults, and the oddities of the format."""
    return [
        render(Config()).encode(),
        render(NameServerConfig()).encode(),
        b"brokerRole = SYNC_MASTER\nlisten\\\n  Port: 20911\r\n# comment\r!another\n\nbrokerName\tx\\u00e9\\t \n",
        b"\xef\xbb\xbflistenPort=1\nlistenPort=2\n",
        b"haSlaveFallbehindMax=1\nhaMaxGapNotInSync=1\nmaxTransferBytesOnMessageInMemory=\n",
        b"aclEnable=true\nbrokerID=1\nflushDiskType=sync\n",
    ]


def option_seeds() -> list[bytes]:
    """Good ones."""
    return [
        to_fields({"path": "/data/a", "subscribe": "t", "startingOffsets": '{"t":{"0":5,"1":-2}}'}),
        to_fields({"servers": "h:9876", "assign": '{"t":["b:0",1]}', "columns": "*", "pullTimeout": "10s"}),
        to_fields({"paths": '["/a","file:///b"]', "startingOffsetsByTimestamp": '{"t":{"0":1700000000000}}'}),
        to_fields({"path": "x", "minOffsetsPerTrigger": 5, "maxTriggerDelay": "5min", "maxBytesPerTrigger": "1g"}),
        to_fields({"path": "x", "subscribePattern": "f.*", "endingOffsets": "latest", "isolation": "read_committed"}),
        b'{"kind":"commit","sink":"s","batch":1,"floors":{"t":{"b":{"0":5}}}}',
    ]


def _keys() -> tuple[bytes, ...]:
    from ha.config.check import fields
    from ha.spark.source.options import _OPTIONS

    return (
        *(key.encode() + b"=" for key in fields(Config)),
        *(name.encode() + EQUALS for name in _OPTIONS.values()),
        FIELD,
        b"\\u0000",
        b"\\\n",
        b"2147483648",
        b"[[[[[[[",
        b"99999999999999999999",
    )


HARNESSES = {
    "configuration": Harness(
        run=configuration, seeds=configuration_seeds, words=_keys(), size_max=600, seconds_max=10.0
    ),
    "spark_options": Harness(run=spark_options, seeds=option_seeds, words=_keys()),
}
