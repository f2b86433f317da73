"""A participant's new certificate takes the place of the one that ends; all else in its kit and beside it stays."""

import io
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from cryptography.x509 import Certificate
from nvflare.lighter import utils as flare

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, read_bytes, write_bytes
from fedtar_flare.site.signatures import UNVERIFIED

MOST = 1 << 20
"""Most bytes of a certificate, a key, or the archive that has a signed certificate."""


def renew(kit: Path, new: Path, key_file: Path | None = None) -> datetime:
    """Put a new certificate with its private key into the kit of a site, a server or a person.

    The key is written first: a renewal that was cut between the two is completed by another.

    Parameters
    ----------
    kit : Path
        The kit to be renewed.
    new : Path
        The participant's new kit, or the archive that ``nvflare cert approve`` wrote, which has no key.
    key_file : Path, optional
        The private key of the archive's certificate.

    Returns
    -------
    datetime
        When the new certificate ends.

    Raises
    ------
    ConfigError
        The certificate is of another participant or root, ends no later, is not valid now, or does not fit the key.
    """
    startup = kit / "startup"
    name = "server" if (startup / "server.crt").is_file() else "client"
    key_file = new / "startup" / f"{name}.key" if new.is_dir() else key_file
    if key_file is None:
        raise ConfigError(f"{new} has no private key: name the one of the request by --key, such as NAME/NAME.key")
    try:
        content = read_bytes(new / "startup" / f"{name}.crt", MOST) if new.is_dir() else _signed(new)
        key_text = read_bytes(key_file, MOST)
        root, before = flare.load_crt(startup / "rootCA.pem"), flare.load_crt(startup / f"{name}.crt")
        chain, key = flare.load_crt_chain_bytes(content), flare.load_private_key(key_text.decode("ascii"))
    except (BadZipFile, OSError, RuntimeError, TypeError, ValueError, zlib.error) as error:
        raise ConfigError(f"{new} cannot be put into {kit}: {error}") from error
    if reason := _misfit(before, chain, root):
        raise ConfigError(f"the certificate of {new} {reason}. Nothing was changed")
    if chain[0].public_key() != key.public_key():
        raise ConfigError(f"{key_file} is not the key of the certificate of {new}. Nothing was changed")
    write_bytes(startup / f"{name}.key", key_text, PRIVATE)
    write_bytes(startup / f"{name}.crt", content, PRIVATE)
    return chain[0].not_valid_after_utc


def _signed(archive: Path) -> bytes:
    with ZipFile(io.BytesIO(read_bytes(archive, MOST))) as members:
        found = [member for member in members.infolist() if member.filename.endswith(".crt")]
        if len(found) != 1 or found[0].file_size > MOST:
            raise ValueError("it has not exactly one certificate")
        return members.read(found[0])


def _misfit(before: Certificate, chain: Sequence[Certificate], root: Certificate) -> str:
    """Say why a certificate, with those that signed it, does not take the place of another; empty if it does."""
    new, now = chain[0], datetime.now(UTC)
    first, last = new.not_valid_before_utc, new.not_valid_after_utc
    if new.subject != before.subject:
        return f"is of {new.subject.rfc4514_string()}, this kit of {before.subject.rfc4514_string()}"
    if not first <= now <= last:
        return f"is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC, not now"
    if last <= before.not_valid_after_utc:
        return f"ends on {last:%Y-%m-%d}, no later than the one that this kit has"
    try:
        flare.verify_cert_chain(new, chain[1:], root)
    except (*UNVERIFIED, ValueError):
        return "is not signed by this kit's root: after a change of the root everybody needs a new kit"
    return ""
