"""A small authority of a deployment, and the certificates that it signs.

ca/cert.pem, ca/key.pem        the authority; its key stays where it was made
<folder>/cert.pem, key.pem     a server's certificate, for the names by which it is reached
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from digenrl.local.limits import MAX_CERTIFICATE_DAYS
from digenrl.local.secrets.tokens import write_secret
from shared.errors import UserError


@dataclass(frozen=True, slots=True)
class Certificate:
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates; a holder of its key can impersonate any server of the deployment."""

    folder: Path

    @property
    def pem(self) -> str:
        """Its own certificate, which clients trust."""
        return (self.folder / "cert.pem").read_text()

    def certificate(self, folder: Path, names: Sequence[str]) -> Certificate:
        """Return the certificate in ``folder`` for a server of these names, made if it has none.

        Raises:
            UserError: if a name cannot be in a certificate.
        """
        pair = Certificate(folder / "cert.pem", folder / "key.pem")
        if not pair.cert.exists():
            authority = trustme.CA.from_pem(
                self.pem.encode(), (self.folder / "key.pem").read_bytes()
            )
            until = datetime.now(UTC) + timedelta(days=MAX_CERTIFICATE_DAYS)
            try:
                if any(char in "/@" for name in names for char in name):
                    raise ValueError("it is a network or a mailbox")
                signed = authority.issue_cert(*names, not_after=until)
            except ValueError as error:
                raise UserError(
                    f"--tls: {', '.join(names)!r} is no name of a host; name one host or address"
                ) from error
            chain = b"".join(each.bytes() for each in signed.cert_chain_pems)
            _write(pair, signed.private_key_pem.bytes(), chain)
        return pair


def authority_in(folder: Path) -> Authority:
    """Return the authority in ``folder``, made if it does not exist."""
    certificate = Certificate(folder / "cert.pem", folder / "key.pem")
    if not certificate.cert.exists():
        own = trustme.CA(organization_name="DigenRL")
        _write(certificate, own.private_key_pem.bytes(), own.cert_pem.bytes())
    return Authority(folder)


def _write(certificate: Certificate, key: bytes, cert: bytes) -> None:
    """Write a key and its certificate, which comes last."""
    certificate.cert.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_secret(certificate.key, key.decode())
    write_secret(certificate.cert, cert.decode())
