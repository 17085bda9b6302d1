"""The secrets by which each role proves itself to the brokers, made once and kept in files.

keys/<role>/secret            credentials of the role, at NATS, Redis and the store
keys/<role>/digenrl_nats_url  and other settings, one file each: DIGENRL_SECRETS_DIR of a
                              service is the folder of its role
keys/hosts.env                what all hosts share, without secrets
"""

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from digenrl.local.secrets.tokens import KEYS, write_secret
from shared.messages.rights import ROLES, Role

SECRET = "secret"
STORE = "store"
SETTINGS = "hosts.env"


@dataclass(frozen=True, slots=True)
class Keys:
    """The secrets of all roles, below a folder that its owner alone can read."""

    folder: Path

    def secret(self, role: Role) -> str:
        return (self.folder / role / SECRET).read_text().strip()

    @property
    def store(self) -> str:
        """The secret of the store's own parts, and of its owner."""
        return (self.folder / STORE / SECRET).read_text().strip()

    def write(self, settings: Mapping[Role, Mapping[str, str]]) -> None:
        """Write what each role needs to know, as files that services read."""
        for role, named in settings.items():
            for name, value in named.items():
                write_secret(self.folder / role / name.lower(), value)

    def write_settings(self, variables: Mapping[str, str]) -> None:
        """Write what all hosts of the run share, for a shell and `digenrl host`."""
        lines = (f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        write_secret(self.folder / SETTINGS, "".join(lines))

    def environment(self, role: Role) -> dict[str, str]:
        """Return the variable by which a service of this role finds its files."""
        return {"DIGENRL_SECRETS_DIR": str((self.folder / role).absolute())}


def load_keys(folder: Path) -> Keys:
    """Return the keys of the run in ``folder``, made where they are missing."""
    return keys_in(folder / KEYS)


def keys_in(folder: Path) -> Keys:
    """Return the keys that are kept in ``folder`` itself, made where they are missing."""
    keys = Keys(folder)
    keys.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in (*ROLES, STORE):
        path = keys.folder / role / SECRET
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            # Letters, digits, - and _: it stands in URLs and in the brokers' own files.
            write_secret(path, secrets.token_urlsafe(32) + "\n")
    return keys
