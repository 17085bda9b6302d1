"""Where the object store is, and the credentials for it."""

from dataclasses import dataclass

from pydantic import SecretStr


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    url: str
    endpoint: str | None = None
    """URL of an S3 service other than Amazon's."""
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    """Session token that belongs to temporary keys."""
