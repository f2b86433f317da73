"""Files that participants of a federation sign with their kit's key, and that its root certificate verifies."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import VerificationError
from nvflare.lighter import utils as flare

from fedtar_flare.core.errors import ConfigError

UNVERIFIED = InvalidSignature, UnsupportedAlgorithm, VerificationError


def sign(content: Mapping[str, Any], kit: Path) -> bytes:
    """Make a file that the participant of a kit has signed; ``content`` says its ``time``."""
    try:
        certificate = flare.load_crt(kit / "startup" / "client.crt")
        key = flare.load_private_key_file(kit / "startup" / "client.key")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{kit} is no kit of a participant, to sign with ({error})") from error
    return _file(certificate, content, flare.sign_content(_text(content), key, return_str=False))


def verify(signed: bytes, root: Path, where: str) -> tuple[dict[str, Any], list[Any]]:
    """Give what a signed file says, with name and role of who signed it (a site has a name alone).

    The certificate must have been valid at the file's own time: it ends long before the file is of no more use.
    """
    try:
        trusted, parts = flare.load_crt(root), json.loads(signed)
        certificate = flare.load_crt_bytes(parts["certificate"].encode())
        content, signature = parts["content"], b64decode(parts["signature"])
        if signed != _file(certificate, content, signature):
            raise ValueError("other bytes than were signed")
        flare.verify_content(_text(content), signature, certificate.public_key())
        flare.verify_cert_chain(certificate, [], trusted, now=datetime.fromisoformat(content["time"]))
    except (*UNVERIFIED, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        why = f"changed, or signed by nobody of the federation of {root} ({error or type(error).__name__})"
        raise ConfigError(f"{where}: {why}") from error
    kinds = NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME
    return content, [value.value for kind in kinds for value in certificate.subject.get_attributes_for_oid(kind)]


def _file(certificate: Any, content: Any, signature: bytes) -> bytes:
    pem, text = flare.serialize_cert(certificate).decode(), b64encode(signature).decode()
    return _text({"certificate": pem, "content": content, "signature": text})


def _text(content: Any) -> bytes:
    """The one text of a content, so that no other bytes say the same.

    It begins with a brace, as nothing does that FLARE signs with this key: a name, and what the server asked for.
    """
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
