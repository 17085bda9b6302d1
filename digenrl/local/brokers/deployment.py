"""All secrets of a deployment in one folder, and the configuration of brokers that others start.

<role>/               DIGENRL_SECRETS_DIR of a service of that role, which needs no other folder
view/                 DIGENRL_SECRETS_DIR of the run's page, with an operator's token
hosts.env             what all hosts share, which `digenrl host` reads
api_tokens.json       DIGENRL_API_TOKENS of every service; viewer.token, operator.token ...
brokers/nats/         nats.conf of nats-server; its users also alone, as users.conf
brokers/redis/        redis.conf of Redis; its users also alone, as users.acl, for an aclfile
brokers/s3/           HOME of SeaweedFS: .seaweedfs/security.toml, and s3.json for -s3.config
ca/                   the certificate authority, with TLS; each server's certificate is next to
    its configuration
"""

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from digenrl.local.brokers import seaweedfs
from digenrl.local.brokers.embedded import DURABLE, broker_secrets, redis_users
from digenrl.local.brokers.nats_config import authorization, quoted, server_config
from digenrl.local.secrets.certificates import Authority, Certificate, authority_in
from digenrl.local.secrets.keys import Keys, keys_in
from digenrl.local.secrets.tokens import Tokens, tokens_in, write_secret
from shared.messages.rights import ROLES

VIEW = "view"
DATA = "/data"
"""Where brokers keep what they store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddresses:
    """Where services reach the brokers: host and port of each, and the names of the scheduler's
    host if servers have certificates."""

    nats: str
    redis: str
    s3: str
    tls: Sequence[str] = ()

    @property
    def s3_address(self) -> str:
        """Address of the object store, with TLS if servers have certificates."""
        given = urlsplit(self.s3)
        return given._replace(scheme="https").geturl() if self.tls else self.s3


def make_deployment(folder: Path, places: BrokerAddresses, runs: Collection[str] = ()) -> list[str]:
    """Make missing files, and the configuration again; return lines that locate each. Roles write
    to these runs.

    Raises:
        UserError: if certificates are requested and cannot be made.
    """
    keys, tokens = keys_in(folder), tokens_in(folder)
    authority = authority_in(folder / "ca") if places.tls else None
    brokers = folder / "brokers"
    brokers.mkdir(mode=0o700, exist_ok=True)
    at_nats = _certificate(authority, brokers / "nats", places.nats)
    _write_services(keys, tokens, places, authority, runs)
    _write_nats(brokers / "nats", keys, places.nats, at_nats)
    at_redis = _certificate(authority, brokers / "redis", places.redis)
    _write_redis(brokers / "redis", keys, places.redis, at_redis)
    home = brokers / "s3"
    _certificate(authority, home, urlsplit(places.s3).netloc)
    seaweedfs.write_settings(home, keys, seaweedfs.make_internal_tls(home), runs)
    lines = [
        f"services: DIGENRL_SECRETS_DIR={folder}/<role>",
        f"services: DIGENRL_API_TOKENS={folder}/api_tokens.json",
        f"brokers: {brokers} has nats/nats.conf, redis/redis.conf, and s3, the HOME of SeaweedFS",
        f"people: {folder}/viewer.token, operator.token, admin.token",
    ]
    if authority is not None:
        certificate = authority.certificate(folder / "scheduler", places.tls)
        lines.append(
            f"scheduler: DIGENRL_TLS_CERT={certificate.cert}, DIGENRL_TLS_KEY={certificate.key}"
        )
        lines.append(f"people: {folder}/ca/cert.pem, which browsers and curl --cacert trust")
    return lines


def kubernetes_secrets(folder: Path, name: str) -> dict[str, Any]:
    """Return a Secret for each folder that a container mounts; a key is the path of a file in it,
    with `__` for `/`."""
    items = []
    for place in (*(folder / each for each in (*ROLES, VIEW)), *(folder / "brokers").iterdir()):
        files = (path for path in sorted(place.rglob("*")) if path.is_file())
        names = {str(path.relative_to(place)).replace("/", "__"): path for path in files}
        data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in names.items()}
        users = "brokers" if place.parent.name == "brokers" else "services"
        metadata = {"name": f"{name}-{place.name}", "labels": {"digenrl/users": users}}
        items.append({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _write_services(
    keys: Keys, tokens: Tokens, places: BrokerAddresses, authority: Authority | None,
    runs: Collection[str],
) -> None:  # fmt: skip
    """Write what services of each role read; a client has a viewer's token as well, and the page an
    operator's, for what operators ask of it."""
    shared = {
        "DIGENRL_STORE_URL": f"s3://{seaweedfs.BUCKET}",
        "DIGENRL_S3_ENDPOINT": places.s3_address,
        **({} if authority is None else {"DIGENRL_CA": authority.pem}),
    }
    if runs:
        keys.write_settings({**shared, "DIGENRL_RUN": next(iter(runs))})
    is_encrypted = authority is not None
    settings = broker_secrets(keys, nats=places.nats, redis=places.redis, is_encrypted=is_encrypted)
    keys.write({role: {**secrets, **shared} for role, secrets in settings.items()})
    accepted = tokens.accepted.read_text()
    keys.write({role: {tokens.accepted.name: accepted} for role in settings})
    keys.write({"client": {"DIGENRL_API_TOKEN": tokens.token("viewer")}})
    page = settings["client"] | shared | {tokens.accepted.name: accepted}
    (keys.folder / VIEW).mkdir(mode=0o700, exist_ok=True)
    for name, value in {**page, "DIGENRL_API_TOKEN": tokens.token("operator")}.items():
        write_secret(keys.folder / VIEW / name.lower(), value)


def _certificate(authority: Authority | None, folder: Path, at: str) -> Certificate | None:
    """Return the certificate of the server at this host and port, for itself as well."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if authority is None:
        return None
    host = at.rpartition(":")[0].strip("[]")
    return authority.certificate(folder, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))


def _write_nats(folder: Path, keys: Keys, at: str, tls: Certificate | None) -> None:
    listen, monitor = f"0.0.0.0:{_port(at)}", "127.0.0.1:8222"
    config = server_config(DATA, listen=listen, monitor=monitor, keys=keys, tls=tls)
    write_secret(folder / "nats.conf", config)
    write_secret(folder / "users.conf", authorization(keys))


def _write_redis(folder: Path, keys: Keys, at: str, tls: Certificate | None) -> None:
    users = redis_users(keys)
    write_secret(folder / "users.acl", users + "\n")
    ports = f"port {_port(at)}\n"
    if tls is not None:
        ports = f"""port 0
tls-port {_port(at)}
tls-cert-file {quoted(tls.cert.absolute())}
tls-key-file {quoted(tls.key.absolute())}
tls-auth-clients no
"""
    write_secret(folder / "redis.conf", f"bind * -::*\n{ports}dir {DATA}\n{users}\n{DURABLE}")


def _port(at: str) -> str:
    return at.rpartition(":")[2]
