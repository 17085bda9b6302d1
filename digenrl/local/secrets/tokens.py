"""The tokens of a run's HTTP API, made once and kept in the run's folder.

keys/api_tokens.json   accepted tokens: names, roles and the sha256 of each token
keys/viewer.token      for programs that look, such as Prometheus
keys/operator.token    for programs that steer the run
keys/admin.token
"""

import os
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError
from shared.process.http_access import (
    ROLES,
    Role,
    TokenRecord,
    new_secret,
    secret_digest,
    token_file,
)

KEYS = "keys"
"""Folder of the keys of a run, which its owner alone can read."""


@dataclass(frozen=True, slots=True)
class Tokens:
    folder: Path

    @property
    def accepted(self) -> Path:
        """The file of what services accept."""
        return self.folder / "api_tokens.json"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which services find what they accept."""
        return {"DIGENRL_API_TOKENS": str(self.accepted.absolute())}

    def token(self, role: Role) -> str:
        """Return the token of a role.

        Raises:
            UserError: if it does not exist.
        """
        path = self.folder / f"{role}.token"
        try:
            return path.read_text().strip()
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; delete {self.accepted} to have new tokens made"
            ) from error

    def headers(self, role: Role) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token(role)}"}


def load_tokens(folder: Path) -> Tokens:
    """Return the tokens of the run in ``folder``, made if it has none."""
    return tokens_in(folder / KEYS)


def tokens_in(folder: Path) -> Tokens:
    """Return the tokens that are kept in ``folder`` itself, made if it has none."""
    tokens = Tokens(folder)
    tokens.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not tokens.accepted.exists():
        records = []
        for role in ROLES:
            token = new_secret()
            write_secret(tokens.folder / f"{role}.token", token + "\n")
            records.append(TokenRecord(name=role, role=role, sha256=secret_digest(token)))
        write_secret(tokens.accepted, token_file(records))
    return tokens


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, at once and whole."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
