"""The compiled twin for usual property strings equals the Python one, and `of`."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ha.broker.options import BrokerOptions
from ha.broker.stored_properties import StoredProperties, usual_properties
from ha.protocol.compiled import pure

PAIRS = [
    "TAGS\x01a",
    "KEYS\x01k1 k2",
    "UNIQ_KEY\x017F00000100002A9F18B4AAC200000001",
    "UNIQ_KEY\x01",
    "UNIQ_KEY",
    "WAIT\x01true",
    "WAIT\x01false",
    "WAITING\x01false",
    "CLUSTER\x01c",
    "CLUSTERS\x01c",
    "MSG_REGION\x01r",
    "TRACE_ON\x01true",
    "DELAY\x013",
    "DELAYED\x013",
    "TRAN_MSG\x01true",
    "TIMER_DELAY_SEC\x011",
    "TIMER",
    "x\x01DELAY\x013",
    "ü\x01ü",
    "",
    "\x01",
]
texts = st.lists(st.sampled_from(PAIRS), max_size=4).flatmap(
    lambda pairs: st.sampled_from(["\x02".join(pairs), "".join(f"{pair}\x02" for pair in pairs)])
)


@given(texts)
def test_compiled_properties_equal_python(text: str) -> None:
    compiled, python = (
        make(text, b"CLUSTER\x01c\x02", lambda: "NEW") for make in (usual_properties, pure(usual_properties))
    )
    assert compiled == python


@given(texts)
def test_usual_path_stores_the_same_as_the_general_path(text: str) -> None:
    properties = StoredProperties(BrokerOptions(config_dir=Path("config")), unique_id=lambda: "NEW")
    usual = properties.usual(text)
    if usual is not None:
        stored, unique_key = usual
        assert properties.of(text, is_batch=False) == (stored, True, unique_key)
