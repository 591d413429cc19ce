"""Addresses as text."""

import pytest

from ha.protocol.addresses import split_address


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:9876", ("127.0.0.1", 9876)), ("h:65535", ("h", 65_535)), ("[::1]:9876", ("::1", 9876))],
)
def test_addresses_are_split(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize(
    "text", ["", "host", ":9876", "[]:9876", "host:", "host:x", "host:0", "host:65536", "host:²", f"host:{'1' * 5000}"]
)
def test_malformed_addresses_are_refused(text: str) -> None:
    """Five thousand digits are more than `int` reads."""
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(text)
