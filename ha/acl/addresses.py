"""Address patterns of plain_acl.yml: hosts whose requests need no signature.

    1.2.3.4   a::1                one address
    1.2.3.4,5.6.7.8               several, separated by commas
    1.2.3.{4,5}   a:…:{1,2}       several that differ in their last part
    1.2.3.*   1.2.1-9.*   a::5-7f parts that are * or a range (hexadecimal in an IPv6 address)
    a:b:*                         * at the end of an IPv6 address matches all remaining parts
    *   *.*.*.*   *:*:*:*:*:*:*:* any

Source: RemoteAddressStrategyFactory. Stricter than RocketMQ in one respect: every part has to match. RocketMQ ignores
the parts after the first * or range, so 1.2.*.4 means 1.2.*.* there.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

Range = tuple[int, int]

_ANY = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})


class AddressPattern:
    """A parsed address pattern."""

    __slots__ = ("_alternatives", "is_any", "text")

    def __init__(self, text: str) -> None:
        """Raises ValueError with the reason if `text` is not a pattern."""
        self.text = text
        self.is_any = text in _ANY
        self._alternatives: list[list[Range]] = [] if self.is_any else [_parts(each) for each in _split(text)]

    def __repr__(self) -> str:
        return f"AddressPattern({self.text!r})"

    def matches(self, host: str) -> bool:
        """Returns whether the pattern matches `host`. Only a pattern for any address matches a host that is not an IP
        address."""
        if self.is_any:
            return True
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        packed = address.packed
        parts = list(packed) if len(packed) == 4 else [packed[at] << 8 | packed[at + 1] for at in range(0, 16, 2)]
        return any(
            len(ranges) == len(parts)
            and all(low <= part <= high for (low, high), part in zip(ranges, parts, strict=True))
            for ranges in self._alternatives
        )


def _split(text: str) -> list[str]:
    """Returns the alternatives in `text`. Raises ValueError if braces stand for anything but the whole last part."""
    if text.endswith("}"):
        head, brace, tail = text.partition("{")
        if not brace or "{" in tail or head[-1:] not in (".", ":"):
            raise ValueError(f"{text!r}: braces stand for the whole last part of an address")
        return [head + part.strip() for part in tail[:-1].split(",") if part.strip()]
    return [part.strip() for part in text.split(",") if part.strip()]


def _parts(text: str) -> list[Range]:
    if ":" not in text:
        words = text.split(".")
        if len(words) != 4:
            raise ValueError(f"{text!r} is no IPv4 address: it has {len(words)} parts")
        return [_range(word, 10, 255, text) for word in words]
    left, double, right = text.partition("::")
    words = left.split(":") if left else []
    if double:
        behind = right.split(":") if right else []
        if "::" in right or len(words) + len(behind) > 7:
            raise ValueError(f"{text!r} is no IPv6 address")
        words += ["0"] * (8 - len(words) - len(behind)) + behind
    elif words[-1] == "*":
        words += ["*"] * (8 - len(words))
    if len(words) != 8:
        raise ValueError(f"{text!r} is no IPv6 address: it has {len(words)} parts")
    return [_range(word, 16, 0xFFFF, text) for word in words]


def _range(word: str, base: int, largest: int, text: str) -> Range:
    word = word.strip()
    if word == "*":
        return 0, largest
    match = re.fullmatch(r"([0-9A-Fa-f]{1,4})(?:-([0-9A-Fa-f]{1,4}))?", word)
    if match:
        try:
            low, high = int(match[1], base), int(match[2] or match[1], base)
        except ValueError:
            pass
        else:
            if low <= high <= largest:
                return low, high
    raise ValueError(f"{text!r}: {word!r} is no part of an address")
