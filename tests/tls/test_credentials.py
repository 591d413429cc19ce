"""Certificates that change, end, or can't be used."""

import logging
import os
import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
import trio.testing

from ha.config import SecretStr
from ha.errors import CertificateUnusable, HandshakeFailed
from ha.tls.certificate import earliest_end_ms, not_after_ms
from ha.tls.credentials import Credentials
from ha.tls.files import TlsFiles, client_context, server_context
from ha.tls.handshake import Handshakes, common_name
from tests.tls.pki import Pki

DAY_MS = 86_400_000
PASSWORD = "open sesame"


class Clock:
    """A time of day that the test sets."""

    def __init__(self) -> None:
        self.now_ms = int(datetime.now(UTC).timestamp() * 1000)

    def __call__(self) -> int:
        return self.now_ms


def credentials(files: TlsFiles, clock: Clock | None = None) -> Credentials:
    return Credentials("server", files, server_context, wall_clock_ms=clock or Clock())


async def shaken(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Whom the client sees."""
    ours, theirs = trio.testing.memory_stream_pair()
    handshakes = Handshakes()
    seen: list[str | None] = []

    async def connect() -> None:
        seen.append(common_name(await handshakes.connect(ours, client, "localhost")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(connect)
        await handshakes.accept(theirs, server)
    return seen[0]


# Reloading


async def test_new_files_serve_new_connections_and_old_ones_go_on(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    kept = credentials(pki.files("server", common_name="old"))
    old = kept.context
    assert not kept.refresh()
    pki.issue("server", common_name="new")
    with caplog.at_level(logging.INFO):
        assert kept.refresh()
    assert "tls.reloaded role=server" in caplog.text
    client = client_context(TlsFiles(trust=pki.trust))
    assert await shaken(kept.context, client) == "new"
    assert await shaken(old, client) == "old"
    assert not kept.refresh()


async def test_a_key_that_comes_later_than_its_certificate(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    """Two files can't be replaced in one step: in between they don't fit, and the old pair stays."""
    kept = credentials(pki.files("server", common_name="old"))
    new = Pki(pki.folder, "ca")  # another CA: the client below must trust only the old one's
    certificate, key = new.issue("next", common_name="new")
    before = kept.context
    shutil.copy(certificate, kept.files.certificate)
    for _ in range(3):
        assert not kept.refresh()
    assert kept.context is before
    assert [r.levelno for r in caplog.records] == [logging.ERROR], "told once, not at every look"
    assert "it is not the key of" in caplog.text
    assert "is not the key of" in kept.status().error
    shutil.copy(key, kept.files.key)
    assert kept.refresh()
    assert kept.status().error == ""
    assert await shaken(kept.context, client_context(TlsFiles(trust=new.trust))) == "new"


@pytest.mark.parametrize("damage", ["empty", "half", "nonsense", "gone", "a folder"])
@pytest.mark.parametrize("which", ["certificate", "key", "trust"])
def test_a_bad_new_file_changes_nothing(damage: str, which: str, pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    files = pki.files("server")
    kept = Credentials(
        "server",
        files,
        lambda files: server_context(files, client_certificates=ssl.CERT_REQUIRED),
        wall_clock_ms=Clock(),
    )
    before, path = kept.context, Path(getattr(files, which))
    good = path.read_bytes()
    if damage in ("gone", "a folder"):
        path.unlink()
    if damage == "a folder":
        path.mkdir()
    if damage in ("empty", "half", "nonsense"):
        path.write_bytes({"empty": b"", "half": good[: len(good) // 2], "nonsense": os.urandom(3000)}[damage])
    assert not kept.refresh()
    assert kept.context is before
    assert str(path) in kept.status().error
    assert caplog.text.count("tls.reload_failed") == 1
    if damage == "a folder":
        path.rmdir()
    path.write_bytes(good)
    os.utime(path, ns=(1, 1))
    assert kept.refresh()
    assert kept.status().error == ""


def test_a_file_that_becomes_readable_is_loaded(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    """By chmod or chown, which change neither its time nor its size."""
    files, is_readable = pki.files("server"), True

    def make(files: TlsFiles) -> ssl.SSLContext:
        if not is_readable:
            raise CertificateUnusable(files.key, "Permission denied")
        return server_context(files, client_certificates=ssl.CERT_REQUIRED)

    kept = Credentials("server", files, make, wall_clock_ms=Clock())
    is_readable = False
    os.utime(files.key, ns=(1, 1))
    assert [kept.refresh(), kept.refresh()] == [False, False]
    assert caplog.text.count("tls.reload_failed") == 1
    is_readable = True
    assert [kept.refresh(), kept.refresh()] == [True, False]
    assert kept.status().error == ""


async def test_withdrawn_trust_holds_for_new_connections(pki: Pki) -> None:
    files = pki.files("server")
    make = lambda files: server_context(files, client_certificates=ssl.CERT_REQUIRED)  # noqa: E731
    kept = Credentials("server", files, make, wall_clock_ms=Clock())
    client = pki.client("friend")
    client.maximum_version = ssl.TLSVersion.TLSv1_2  # so that the client sees the verdict in its handshake
    await shaken(kept.context, client)
    shutil.copy(Pki(pki.folder, "others").trust, files.trust)
    assert kept.refresh()
    with pytest.raises(ExceptionGroup) as caught:
        await shaken(kept.context, client)
    assert caught.group_contains(HandshakeFailed, match="the certificate is not valid")


# The end of a certificate


@pytest.mark.parametrize(
    ("days", "line"),
    [
        (32, None),
        (29, "tls.certificate_expiring"),
        (1.5, "tls.certificate_expiring"),
        (-1, "tls.certificate_expired"),
    ],
)
def test_the_end_is_warned_of(days: float, line: str | None, pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    kept = credentials(pki.files("server", valid_for=timedelta(days=days)), clock)
    kept.refresh()
    assert kept.status().is_expiring == (line is not None)
    assert [r.getMessage().split()[0] for r in caplog.records] == ([] if line is None else [line])
    kept.refresh()
    assert len(caplog.records) == (line is not None), "once a day"
    clock.now_ms += DAY_MS
    kept.refresh()
    assert len(caplog.records) == 2 * (line is not None)


def test_the_end_is_warned_of_after_the_clock_was_set_back(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    """A machine without a battery for its clock may begin years ahead."""
    clock = Clock()
    clock.now_ms += 1000 * DAY_MS
    kept = credentials(pki.files("server", valid_for=timedelta(days=3)), clock)
    kept.refresh()
    clock.now_ms -= 1000 * DAY_MS
    kept.refresh()
    lines = [r.getMessage().split()[0] for r in caplog.records]
    assert lines == ["tls.certificate_expired", "tls.certificate_expiring"]


def test_a_new_certificate_ends_the_warning(pki: Pki) -> None:
    kept = credentials(pki.files("server", valid_for=timedelta(days=3)))
    assert kept.status().is_expiring
    pki.issue("server")
    assert kept.refresh()
    assert not kept.status().is_expiring


def test_a_new_certificate_that_ends_soon_is_warned_of_at_once(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    kept = credentials(pki.files("server", valid_for=timedelta(days=3)))
    kept.refresh()
    pki.issue("server", valid_for=timedelta(days=4))
    assert kept.refresh()
    assert [r.getMessage().rpartition(" ")[2] for r in caplog.records] == ["days=3.0", "days=4.0"]


def test_the_end_as_openssl_reads_it(pki: Pki, tmp_path: Path) -> None:
    """Also after 2049, where X.509 writes times in another form, and of the first of several to end."""
    ends = []
    for days in (1, 400, 20_000):
        certificate, _ = pki.issue(f"for-{days}", valid_for=timedelta(days=days))
        pem = Path(certificate).read_text()
        shown = subprocess.run(
            ["openssl", "x509", "-noout", "-enddate", "-in", certificate], capture_output=True, text=True, check=True
        ).stdout
        expected = datetime.strptime(shown.strip(), "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
        ends.append((earliest_end_ms(pem), pem))
        assert ends[-1][0] == int(expected.timestamp() * 1000)
    assert earliest_end_ms("".join(pem for _, pem in reversed(ends))) == ends[0][0]


@pytest.mark.parametrize("label", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_openssls_other_labels_of_certificates(label: str, pki: Pki) -> None:
    files = pki.files("server")
    end = credentials(files).status().expires_at_ms
    with open(files.certificate, "a") as file:
        file.write(Path(pki.trust).read_text().replace("CERTIFICATE", label))
    assert credentials(files).status().expires_at_ms == end


def test_what_is_no_certificate_is_refused(pki: Pki) -> None:
    der = ssl.PEM_cert_to_DER_cert(Path(pki.issue("server")[0]).read_text())
    end = not_after_ms(der)
    for size in range(len(der)):
        with pytest.raises(ValueError, match=r"is truncated|no expiry|no validity|unsupported encoding|does not match"):
            not_after_ms(der[:size])
    for position in range(200):
        changed = der[:position] + bytes([der[position] ^ 0x41]) + der[position + 1 :]
        try:
            not_after_ms(changed)
        except ValueError:
            continue
    assert not_after_ms(der + b"more") == end
    with pytest.raises(ValueError, match="no PEM certificate"):
        earliest_end_ms("hello")


@pytest.mark.parametrize(
    ("share", "reason"), [(0.5, "it contains a damaged PEM certificate"), (0, "it contains no PEM certificates")]
)
def test_authorities_that_can_not_be_read(share: float, reason: str, pki: Pki) -> None:
    trust = Path(pki.trust)
    pem = trust.read_text()
    trust.write_text(pem + pem[: round(len(pem) * share)] if share else "hello")
    with pytest.raises(CertificateUnusable, match=reason):
        client_context(TlsFiles(trust=pki.trust))


# Keys


async def test_an_encrypted_key(pki: Pki, capfd: pytest.CaptureFixture[str]) -> None:
    certificate, key = pki.issue("server", password=PASSWORD)

    def files(password: str | None) -> TlsFiles:
        secret = None if password is None else SecretStr(password)
        return TlsFiles(certificate=certificate, key=key, key_password=secret)

    assert server_context(files(PASSWORD))
    assert PASSWORD not in repr(files(PASSWORD))
    reasons = {None: "its password is missing", "wrong": "its password is wrong", "": "wrong", "w" * 2000: "too long"}
    for password, reason in reasons.items():
        with pytest.raises(CertificateUnusable, match=reason) as caught:
            server_context(files(password))
        assert caught.value.path == key
    pki.issue("other")
    shutil.copy(pki.folder / "other.pem", certificate)
    with pytest.raises(CertificateUnusable, match=f"it is not the key of {certificate}"):
        server_context(files(PASSWORD))
    assert capfd.readouterr().err == "", "nobody is asked on the terminal"


def test_a_key_that_everybody_can_read_is_warned_of(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    files = pki.files("server")
    credentials(files)
    assert not caplog.records
    os.chmod(files.key, 0o644)
    credentials(files)
    assert "tls.key_file_exposed" in caplog.text


@pytest.mark.parametrize("which", ["certificate", "key"])
def test_one_file_for_certificate_and_key(which: str, pki: Pki) -> None:
    certificate, key = pki.issue("server")
    both = pki.folder / "both.pem"
    both.write_bytes(Path(key).read_bytes() + Path(certificate).read_bytes())
    assert server_context(TlsFiles(certificate=str(both)))
    with pytest.raises(
        CertificateUnusable, match="no PEM private key" if which == "certificate" else "no PEM certificate"
    ):
        server_context(TlsFiles(certificate=certificate if which == "certificate" else key))
