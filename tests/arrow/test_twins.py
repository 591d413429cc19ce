"""The compiled twins of ha.arrow return the same values as the Python functions."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.arrow.slices import take_slices
from ha.arrow.split import usual_pieces
from ha.protocol.compiled import pure

needs_compiler = pytest.mark.skipif(take_slices is pure(take_slices), reason="nothing is compiled here")

pieces = st.sampled_from([b"a\x01b", b"KEYS\x01k1 k2", b"n\x01" + b"v" * 40, b"x\x01y"])
strange = st.sampled_from(
    [b"", b"a", b"\x01b", b"a\x01", b"a\x01b\x01c", b"\x01", "gr\xf6\xdfe\x01x".encode(), b"\xff\x01x"]
)
strings = st.lists(st.one_of(*[pieces] * 12, strange), max_size=4).flatmap(
    lambda found: st.sampled_from([b"\x02".join(found), b"\x02".join([*found, b""])])
)


@given(st.lists(strings, max_size=5))
def test_pieces(rows: list[bytes]) -> None:
    raw = np.frombuffer(b"".join(rows), np.uint8)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    found, expected = usual_pieces(raw, offsets), pure(usual_pieces)(raw, offsets)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        for column, right in zip(found, expected, strict=True):
            assert column.tolist() == right.tolist()


def test_usual_pieces() -> None:
    raw = np.frombuffer(b"a\x01bc\x02d\x01e", np.uint8)
    offsets = np.array([0, 5, 5, 8])
    for split in (usual_pieces, pure(usual_pieces)):
        found = split(raw, offsets)
        assert found is not None
        assert [column.tolist() for column in found] == [[0, 5], [1, 6], [4, 8], [0, 1, 1, 2]]
        for other in (
            b"a\x01bc\x02d\x01\xe5",
            b"a\x01bc\x02d\x01\x01",
            b"a\x01bc\x02\x01ee",
            b"a\x01bc\x02dee",
            b"a\x01\x01c\x02d\x01e",
        ):
            assert split(np.frombuffer(other, np.uint8), offsets) is None


@given(st.binary(max_size=60), st.data())
def test_slices(raw: bytes, data: st.DataObject) -> None:
    bounds = data.draw(st.lists(st.tuples(st.integers(0, len(raw)), st.integers(0, 20)), max_size=6))
    begins = np.array([begin for begin, _ in bounds], np.int64)
    sizes = np.array([min(size, len(raw) - begin) for begin, size in bounds], np.int64)
    kind = data.draw(st.sampled_from([None, pa.binary(), pa.string()]))
    buffer = pa.py_buffer(raw)
    found = take_slices(buffer, begins, sizes, kind)
    assert found.type == (kind or pa.binary())
    assert found.view(pa.binary()).to_pylist() == [raw[b : b + s] for b, s in zip(begins, sizes, strict=True)]
    assert found.view(pa.binary()).equals(pure(take_slices)(buffer, begins, sizes, kind).view(pa.binary()))


@needs_compiler
@pytest.mark.parametrize(("begin", "size"), [(-1, 2), (9, 2), (11, 0), (0, -1), (1 << 62, 1 << 62)])
def test_slices_outside_the_buffer_are_refused(begin: int, size: int) -> None:
    with pytest.raises(ValueError, match="of 10"):
        take_slices(pa.py_buffer(bytes(10)), np.array([begin]), np.array([size]))


@needs_compiler
@pytest.mark.parametrize("offsets", [[0, 99], [5, 0], [-1, 3]])
def test_strings_outside_the_buffer_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="of 3 bytes"):
        usual_pieces(np.frombuffer(b"a\x01b", np.uint8), np.array(offsets))
