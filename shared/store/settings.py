"""Where the object store is, the credentials for it, and what a host keeps of it."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from shared.messages.records import HOME


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    url: str
    endpoint: str | None = None
    """URL of an S3 service other than Amazon's."""
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    """Session token that belongs to temporary keys."""
    folder: Path | None = None
    """Folder of this host where the service keeps what it stores; None: it is not known here."""
    ca: str | None = None
    """Certificates, as PEM text, by which the service is verified besides those that the machine
    trusts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    folder: Path
    is_chosen: bool
    """Whether the folder was configured, so that failures to use it are errors."""
    limit: int
    """Most bytes in it."""
    share_at: tuple[str, int] | None = None
    """Host and port at which other hosts find what it holds."""
    site: str = HOME
