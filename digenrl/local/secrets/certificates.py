"""A small authority of a deployment, and the certificates that it signs.

openssl makes them: no package that DigenRL needs can, and a few commands are no reason for another.

    ca/cert.pem, ca/key.pem        who signs; the key stays where it was made
    <folder>/cert.pem, key.pem     of one server, for the names by which it is reached
"""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from digenrl.local.secrets.tokens import write_secret
from shared.errors import UserError

AUTHORITY_DAYS = 3650
DAYS = 825
"""Longest life of a certificate that browsers take."""
NAME = re.compile(r"[A-Za-z0-9_*:][A-Za-z0-9_.*:-]{0,250}")

_AUTHORITY = """basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
"""
_SERVER = """basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth,clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = """


@dataclass(frozen=True, slots=True)
class Certificate:
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates; whoever has its key can pass for any server of the deployment."""

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
        made = Certificate(folder / "cert.pem", folder / "key.pem")
        if not made.cert.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            by = ("-CA", str(self.folder / "cert.pem"), "-CAkey", str(self.folder / "key.pem"))
            _make(made, "DigenRL service", _SERVER + _alternatives(names), DAYS, *by)
        return made


def has_openssl() -> bool:
    return shutil.which("openssl") is not None


def authority_in(folder: Path) -> Authority:
    """Return the authority that is kept in ``folder``, made if there is none.

    Raises:
        UserError: if openssl is not installed.
    """
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    if not made.cert.exists():
        if not has_openssl():
            raise UserError("--tls: openssl is not installed; install it, or bring certificates")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make(made, "DigenRL authority", _AUTHORITY, AUTHORITY_DAYS)
    return Authority(folder)


def _alternatives(names: Sequence[str]) -> str:
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(f"--tls: {name!r} is no name of a host; name one host or address")
    kinds = ("IP" if name.replace(".", "").isdigit() or ":" in name else "DNS" for name in names)
    return ",".join(f"{kind}:{name}" for kind, name in zip(kinds, names, strict=True)) + "\n"


def _make(made: Certificate, name: str, extensions: str, days: int, *more: str) -> None:
    """Make a key and its certificate; the certificate comes last, and whole."""
    write_secret(made.key, "")  # so that nobody else can read what openssl writes there
    argv = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-noenc", "-days", str(days), "-config", "/dev/stdin",
        "-keyout", str(made.key), *more,
    ]  # fmt: skip
    config = (
        "[req]\ndistinguished_name = name\nx509_extensions = extensions\nprompt = no\n"
        f"[name]\nCN = {name}\n[extensions]\n{extensions}"
    )
    done = subprocess.run(argv, input=config, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"--tls: openssl says: {(done.stderr.strip() or '?').splitlines()[-1]}")
    write_secret(made.cert, done.stdout)
