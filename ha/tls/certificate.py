"""Reads the expiry date of a certificate from its DER bytes.

The standard library returns it only for a peer's verified certificate, and an X.509 library would be a server's largest
dependency. RFC 5280, section 4.1:

    Certificate    ::= SEQUENCE { tbsCertificate, signatureAlgorithm, signatureValue }
    TBSCertificate ::= SEQUENCE { version [0] OPTIONAL, serialNumber INTEGER, signature SEQUENCE, issuer SEQUENCE,
                                  validity SEQUENCE { notBefore Time, notAfter Time }, subject … }
    Time           ::= UTCTime (YYMMDDHHMMSSZ, 50..99 is 19xx) | GeneralizedTime (YYYYMMDDHHMMSSZ)
"""

from __future__ import annotations

import binascii
import re
from datetime import UTC, datetime

_PEM = re.compile(
    r"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.*?)-----END (?:TRUSTED |X509 )?CERTIFICATE-----", re.S
)
_VERSION, _SEQUENCE, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x30, 0x17, 0x18


def earliest_end_ms(pem: str) -> int:
    """Returns the earliest expiry of the certificates in `pem`, ms since the epoch. Raises ValueError if there are
    none, or one is malformed."""
    blocks = _PEM.findall(pem)
    if not blocks:
        raise ValueError("it contains no PEM certificate")
    return min(not_after_ms(binascii.a2b_base64(block)) for block in blocks)


def not_after_ms(der: bytes) -> int:
    """Returns a certificate's notAfter in ms since the epoch. Raises ValueError if `der` is not a certificate."""
    try:
        _, content, _ = _element(_element(der, 0)[1], 0)
        tag, position = content[0], 0
        for _ in range(4 if tag == _VERSION else 3):  # version, serialNumber, signature, issuer
            position = _element(content, position)[2]
        tag, validity, _ = _element(content, position)
        if tag != _SEQUENCE:
            raise ValueError("the certificate has no validity")
        tag, text, _ = _element(validity, _element(validity, 0)[2])
        return _time_ms(tag, text.decode("ascii"))
    except IndexError:
        raise ValueError("the certificate is truncated") from None


def _element(der: bytes, position: int) -> tuple[int, bytes, int]:
    """Returns tag, content and end of the element at `position`. Raises IndexError or ValueError if it is incomplete or
    unsupported.
    """
    tag, length, start = der[position], der[position + 1], position + 2
    if length & 0x80:
        size = length & 0x7F
        if not 1 <= size <= 4:
            raise ValueError("unsupported encoding of a length")
        length, start = int.from_bytes(der[start : start + size], "big"), start + size
    if start + length > len(der):
        raise IndexError
    return tag, der[start : start + length], start + length


def _time_ms(tag: int, text: str) -> int:
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("the certificate has no expiry")
    return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()) * 1000
