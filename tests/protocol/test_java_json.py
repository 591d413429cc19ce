"""The JVM side's JSON: what it writes is read, what it reads is written, anything else is refused."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.java_json import DEPTH_MAX, REFERENCED_VALUES_MAX, dumps, dumps_pretty, loads, read_as

QUEUE = (("brokerName", "b0"), ("queueId", 1), ("topic", "t"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":{0:"x",1:"y"}}', {"a": {"0": "x", "1": "y"}}),
        ('{ 0 : "x" ,\n\t-1\t: "y" }', {"0": "x", "-1": "y"}),
        ('{"0":"x"}', {"0": "x"}),
        (r'{"a":"{0:1,2:3}\"{4:5","b":{6:7}}', {"a": '{0:1,2:3}"{4:5', "b": {"6": 7}}),
        ('{"offsetTable":{{"brokerName":"b0","queueId":1,"topic":"t"}:9}}', {"offsetTable": {QUEUE: 9}}),
        (
            '{"consumerTable":{"c":{{"brokerName":"b0","queueId":1,"topic":"t"}:3}},"x":{}, 5:[true,null,-1.5e2]}',
            {"consumerTable": {"c": {QUEUE: 3}}, "x": {}, "5": [True, None, -150.0]},
        ),
        ('[{{"a":1}:{}},{{"a":1}:[]}]', [{(("a", 1),): {}}, {(("a", 1),): []}]),
        ('{"v":{"counter":2},"m":{"$ref":"$.v"}}', {"v": {"counter": 2}, "m": {"counter": 2}}),
        ('{"l":[1,{"a":2}],"m":[{"$ref":"$.l[1]"}]}', {"l": [1, {"a": 2}], "m": [{"a": 2}]}),
        ('{"t":{1:{"a":2}},"m":{"$ref":"$.t.1"}}', {"t": {"1": {"a": 2}}, "m": {"a": 2}}),
        ('{"a":"é世😀"}', {"a": "é世😀"}),
        (r'{"a":"\u4e16"}', {"a": "世"}),
    ],
)
def test_text_of_the_jvm_is_read(text: str, value: Any) -> None:
    assert loads(text.encode()) == value


def test_bad_utf8_in_the_dialect_becomes_replacement_characters() -> None:
    assert loads(b'{0:"\xff"}') == {"0": "�"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nonsense",
        '{"a":}',
        '{"a":1,}x',
        '{{"a":1}}',
        '{{"a":1}:1',
        '{{"a":1}:1}}',
        '{{"a":[1]}:1}',
        '{{"a":1} 1}',
        '[{{"a":1}:01}]',
        '[{{"a":1}:tru}]',
        r'[{{"a":1}:"\ud800"}]',
        "[" * 100_000,
        "[{{1:1}:" + "[" * DEPTH_MAX + "]" * DEPTH_MAX + "}]",
        '{{"a":1}:"' + "x" * 4_194_304 + '"}',
        '{"a":{"$ref":"$.b"}}',
        '{"a":{"$ref":"$"}}',
        '{"a":{"$ref":".."}}',
        '{"a":{"$ref":1}}',
        '{"a":[1],"b":{"$ref":"$.a[1]"}}',
        '{"a":[1],"b":{"$ref":"$.a.x"}}',
        '{"a":[1],"b":{"$ref":"$a"}}',
        '{"a":{"$ref":"$.b"},"b":{"x":{"$ref":"$.c"}},"c":1}',
    ],
)
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        loads(text.encode())


def test_unterminated_string_is_refused_in_linear_time() -> None:
    with pytest.raises(RemoteProtocolError):
        loads(b'{0:"' + rb"\"" * 2_000_000)


def test_expansion_of_references_is_bounded() -> None:
    target = "[" + ",".join(["0"] * 1000) + "]"
    references = ",".join(['{"$ref":"$.t"}'] * (REFERENCED_VALUES_MAX // 1001 + 1))
    with pytest.raises(RemoteProtocolError, match="expand to more than"):
        loads(f'{{"t":{target},"r":[{references}]}}'.encode())


class Inner(msgspec.Struct, rename="camel"):
    some_name: str | None = None
    addrs: dict[int, str] = {}


@pytest.mark.parametrize(
    "text",
    ['{"addrs":{0:"a",1:"b"}}', '{"addrs":{"0":"a","1":"b"},"someName":null,"new":[]}', '{"addrs":{1:"b", 0:"a"}}'],
)
def test_integer_keys_are_read_where_the_type_has_them(text: str) -> None:
    assert read_as(Inner, text.encode()) == Inner(None, {0: "a", 1: "b"})


@pytest.mark.parametrize(
    "text", ["[]", '{"addrs":{"x":"a"}}', '{"addrs":[1]}', '{{"a":1}:2}', '{"addrs":{{"a":1}:"2"}}', "1"]
)
def test_text_of_another_type_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not of type Inner"):
        read_as(Inner, text.encode())


def test_written_text_has_no_whitespace_and_bare_integer_keys() -> None:
    value: dict[str, Any] = {
        "a": Inner("é\x01", {0: "10.0.0.1:1", 1: "b"}),
        "n": None,
        "l": [1, None, True, 0.5],
        "e": {},
        "f": [],
    }
    assert (
        dumps(value)
        == '{"a":{"someName":"é\\u0001","addrs":{0:"10.0.0.1:1",1:"b"}},"l":[1,null,true,0.5],"e":{},"f":[]}'.encode()
    )
    assert dumps(value, bare_integer_keys=False) == (
        rb'{"a":{"someName":"\u00e9\u0001","addrs":{"0":"10.0.0.1:1","1":"b"}},"l":[1,null,true,0.5],"e":{},"f":[]}'
    )
    assert dumps({QUEUE: 9}) == b'{{"brokerName":"b0","queueId":1,"topic":"t"}:9}'


def test_files_are_indented_with_tabs() -> None:
    assert dumps_pretty({"offsetTable": {"t@g": {0: 5, 1: 6}}}).decode() == (
        '{\n\t"offsetTable":{\n\t\t"t@g":{0:5,1:6\n\t\t}\n\t}\n}'
    )
    assert dumps_pretty({"a": {}, "b": [], "c": ["x", True], "d": {"e": 1, "f": None}}).decode() == (
        '{\n\t"a":{},\n\t"b":[],\n\t"c":[\n\t\t"x",\n\t\ttrue\n\t],\n\t"d":{\n\t\t"e":1\n\t}\n}'
    )


values = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")).filter(lambda key: key != "$ref"), inner, max_size=4)
        | st.dictionaries(st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


def with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): with_text_keys(member) for key, member in value.items()}
    return [with_text_keys(member) for member in value] if isinstance(value, list) else value


@given(values)
def test_values_round_trip_in_each_form(value: Any) -> None:
    expected = with_text_keys(value)
    assert loads(dumps(value)) == expected
    assert loads(dumps_pretty(value)) == expected
    assert loads(dumps(value, bare_integer_keys=False)) == expected
    assert json.loads(dumps(value, bare_integer_keys=False)) == expected


FIRST_USES = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import msgspec

from ha.protocol.java_json import read_as

THREADS = 4
sys.setswitchinterval(1e-6)
barrier = Barrier(THREADS)


def first_use(kind):
    barrier.wait()
    for _ in range(20):
        read_as(kind, b'{"f7":{"a7":1}}')


with ThreadPoolExecutor(THREADS) as pool:
    for number in range(100):
        fields = [(f"a{each}", int | None, None) for each in range(8)]
        inner = [msgspec.defstruct(f"Inner{number}_{each}", fields) for each in range(8)]
        fields = [(f"f{each}", kind | None, None) for each, kind in enumerate(inner)]
        list(pool.map(first_use, [msgspec.defstruct(f"Outer{number}", fields)] * THREADS))
"""


def test_threads_can_use_a_type_for_the_first_time_together() -> None:
    """msgspec 0.22 ended the process with SIGSEGV: another thread saw the type's fields before they were complete."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
