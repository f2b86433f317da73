"""The doctor's look at certificates and at the way to the server."""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding

SOON = timedelta(days=30)
SECONDS = 10.0
CERTIFICATES = ("client.crt", "rootCA.pem")
RENEW = "ask the project's administrator for a new kit"


def certificates(kit: Path, now: datetime | None = None) -> list[Finding]:
    """How long the site's certificate and the project's root are valid, and who can read the private key."""
    now = now or datetime.now(UTC)
    findings = []
    for name in CERTIFICATES:
        file = kit / "startup" / name
        try:
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except (OSError, ValueError) as error:
            findings.append(Finding(FAIL, "certificates", f"{file} cannot be read ({error})", RENEW))
            continue
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        text = f"{name} is valid until {end:%Y-%m-%d}"
        if now < start:
            cure = "check this machine's clock"
            findings.append(Finding(FAIL, "certificates", f"{name} is valid only from {start:%Y-%m-%d}", cure))
        elif now > end:
            findings.append(Finding(FAIL, "certificates", f"{name} expired on {end:%Y-%m-%d}", RENEW))
        else:
            soon = end - now < SOON
            findings.append(Finding(WARN if soon else OK, "certificates", text, RENEW if soon else ""))
    key = kit / "startup" / "client.key"
    if key.is_file() and key.stat().st_mode & 0o077:
        findings.append(Finding(WARN, "certificates", f"{key} can be read by others", f"chmod 600 {key}"))
    return findings


def valid_until(kit: Path) -> dict[str, datetime]:
    """When the kit's certificates end, by file; one that cannot be read is left out."""
    ends = {}
    for name in CERTIFICATES:
        with suppress(OSError, ValueError):
            certificate = x509.load_pem_x509_certificate((kit / "startup" / name).read_bytes())
            ends[name] = certificate.not_valid_after_utc
    return ends


def server(kit: Path, seconds: float = SECONDS) -> Finding:
    """A TLS handshake with the server, using the kit's certificates, and nothing more."""
    file = kit / "startup" / "fed_client.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        host, _, port = content["servers"][0]["service"]["target"].rpartition(":")
        identity = content["servers"][0].get("identity") or host
        address = host, int(port)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Finding(FAIL, "server", f"{file} names no server ({type(error).__name__})", RENEW)
    where = f"{address[0]}:{address[1]}"
    try:
        plain = socket.create_connection(address, timeout=seconds)
    except OSError as error:
        cure = "is the server running? Allow outgoing connections to this host and port in the firewall; no inbound one"
        return Finding(FAIL, "server", f"{where} does not answer ({error})", cure)
    with plain:
        try:
            startup = kit / "startup"
            context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
            context.check_hostname = False  # FLARE's servers go by the name in the project, checked below by its chain
            context.load_cert_chain(startup / "client.crt", startup / "client.key")
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(plain, server_hostname=identity) as secure:
                kind = secure.version()
        except (OSError, ssl.SSLError) as error:
            cure = "a proxy must not open this connection's TLS; without one, the kit is of another project"
            return Finding(FAIL, "server", f"{where}: no TLS with the kit's certificates ({error})", cure)
    return Finding(OK, "server", f"{where} answers, {kind} with the kit's certificates")
