"""The configuration of a NATS server: durable, and with a user for each role."""

import json
from pathlib import Path

from digenrl.local.limits import MAX_JETSTREAM_BYTES
from digenrl.local.secrets.certificates import Certificate
from digenrl.local.secrets.keys import Keys
from shared.messages.rights import ROLES, role_permissions

USER = "digenrl"
"""The one user of a server without roles."""


def server_config(
    store: Path | str,
    *,
    listen: str,
    monitor: str | None = None,
    keys: str | Keys,
    tls: Certificate | None = None,
    bytes: int = MAX_JETSTREAM_BYTES,
) -> str:
    """Return the text of a configuration; it holds secrets.

    ``keys``: the secrets of all roles, or the password of one user who may do everything.
    ``monitor``: where it serves its health without authentication; None: nowhere.
    """
    # sync_interval always: an acknowledged message survives a power cut.
    return f"""listen: {json.dumps(listen)}
{"" if monitor is None else f"http: {json.dumps(monitor)}"}
max_payload: 256KB
jetstream {{
  store_dir: {quoted(store)}
  max_memory_store: 64MB
  max_file_store: {bytes}
  sync_interval: always
}}
{_tls(tls)}{authorization(keys)}"""


def quoted(path: Path | str) -> str:
    """Return a path as a string that NATS, Valkey and TOML read: they know no JSON surrogates."""
    return json.dumps(str(path), ensure_ascii=False)


def _tls(tls: Certificate | None) -> str:
    if tls is None:
        return ""
    cert, key = quoted(tls.cert.absolute()), quoted(tls.key.absolute())
    return f"tls {{ cert_file: {cert}, key_file: {key} }}\n"


def authorization(keys: str | Keys) -> str:
    """Return the users of a server, with their passwords and rights."""
    if isinstance(keys, str):
        return f"authorization {{ user: {USER}, password: {json.dumps(keys)} }}\n"
    users = [
        {
            "user": role,
            "password": keys.secret(role),
            "permissions": {
                "publish": {"allow": list(allowed.publish)},
                "subscribe": {"allow": list(allowed.subscribe)},
            },
        }
        for role in ROLES
        for allowed in [role_permissions(role)]
    ]
    return f"authorization {json.dumps({'users': users}, indent=1)}\n"
