"""The doctor's look at certificates and at the way to the server."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from fedtar_flare.core.files import read_json
from fedtar_flare.site.context import CLOCK_SECONDS, clock_ahead
from fedtar_flare.site.doctor import FAIL, OK, WARN, Finding

SOON = timedelta(days=30)
ROOT = "rootCA.pem"
RENEW = "ask the project's administrator for a new kit"


def certificates(kit: Path, now: datetime | None = None) -> list[Finding]:
    """How long the site's certificate and the project's root are valid, and who can read the private key."""
    findings = [_certificate(kit / "startup" / name, now or datetime.now(UTC)) for name in ("client.crt", ROOT)]
    key = kit / "startup" / "client.key"
    if key.is_file() and key.stat().st_mode & 0o077:
        findings.append(Finding(WARN, "certificates", f"{key} can be read by others", f"chmod 600 {key}"))
    return findings


def _certificate(file: Path, now: datetime) -> Finding:
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        return Finding(FAIL, "certificates", f"{file} cannot be read ({error})", RENEW)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    ends = {f'fedtar_certificate_end_seconds{{file="{file.name}"}}': end.timestamp()}
    if now < start:
        text = f"{file.name} is valid only from {start:%Y-%m-%d}"
        return Finding(FAIL, "certificates", text, "check this machine's clock", ends)
    cure = RENEW if file.name == ROOT else f"{RENEW}; 'fedtar renew' puts its certificate into this one"
    if now > end:
        return Finding(FAIL, "certificates", f"{file.name} expired on {end:%Y-%m-%d}", cure, ends)
    text, soon = f"{file.name} is valid until {end:%Y-%m-%d}", end - now < SOON
    return Finding(WARN if soon else OK, "certificates", text, cure if soon else "", ends)


def clock(kit: Path) -> list[Finding]:
    """Whether this machine's clock goes with the server's, as its site has found while it runs."""
    if (ahead := clock_ahead(kit)) is None:
        return []
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's, when that last answered this site"
    off = abs(ahead) > CLOCK_SECONDS
    cure = "set this machine's clock (NTP), or tell the server's operator: certificates, periods and retention go by it"
    return [Finding(WARN if off else OK, "clock", text, cure if off else "", {"fedtar_clock_ahead_seconds": ahead})]


def server(kit: Path, seconds: float = 10.0) -> Finding:
    """Try a TLS handshake with the server, using the kit's certificates, and nothing more."""
    startup = kit / "startup"
    role = "server" if (startup / "fed_server.json").is_file() else "client"
    file = startup / f"fed_{role}.json"
    try:
        target = read_json(file)["servers"][0]
        host, _, port = target["service"]["target"].rpartition(":")
        address = "127.0.0.1" if role == "server" else host, int(port)
        identity = target.get("identity") or host
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Finding(FAIL, "server", f"{file} names no server ({type(error).__name__})", RENEW)
    where = f"{host}:{port}"
    try:
        plain = socket.create_connection(address, timeout=seconds)
    except OSError as error:
        cure = "is the server running? Allow outgoing connections to this host and port in the firewall; no inbound one"
        return Finding(FAIL, "server", f"{where} does not answer ({error})", cure)
    with plain:
        try:
            context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
            context.check_hostname = False  # FLARE's servers go by the name in the project, checked below by its chain
            context.load_cert_chain(startup / f"{role}.crt", startup / f"{role}.key")
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(plain, server_hostname=identity) as secure:
                return Finding(OK, "server", f"{where} answers, {secure.version()} with the kit's certificates")
        except OSError as error:
            cure = "a proxy must not open this connection's TLS; without one, the kit is of another project"
            return Finding(FAIL, "server", f"{where}: no TLS with the kit's certificates ({error})", cure)
