"""All secrets of a deployment in one folder, and the configuration of brokers that others start.

<role>/               DIGENRL_SECRETS_DIR of a service of that role
api_tokens.json       DIGENRL_API_TOKENS of every service; viewer.token, operator.token ...
brokers/nats.conf     of nats-server
brokers/users.acl     of Redis (aclfile)
brokers/.seaweedfs/   of SeaweedFS, whose HOME is `brokers` (security.toml; -s3.config=s3.json)
tls/                  DIGENRL_TLS_CERT and DIGENRL_TLS_KEY of the scheduler, if asked for
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from digenrl.local import seaweedfs
from digenrl.local.brokers import redis_users, secrets_of
from digenrl.local.keys import keys_in
from digenrl.local.nats_config import server_config
from digenrl.local.tokens import tokens_in, write_secret
from shared.errors import UserError

DAYS = 825
"""Longest life of a certificate that browsers take."""


def make_deployment(
    folder: Path, *, nats: str, redis: str, s3: str, names: Sequence[str] = ()
) -> list[str]:
    """Make what is missing, and the configuration anew; return lines that say what is where.

    Args:
        nats, redis: host and port at which services reach them.
        s3: address of the object store.
        names: names and addresses for a certificate; none: no TLS.

    Raises:
        UserError: if a certificate is asked for and openssl is not installed.
    """
    keys = keys_in(folder)
    tokens_in(folder)
    settings = secrets_of(keys, nats=nats, redis=redis)
    places = {"DIGENRL_STORE_URL": f"s3://{seaweedfs.BUCKET}", "DIGENRL_S3_ENDPOINT": s3}
    keys.write({role: {**secrets, **places} for role, secrets in settings.items()})
    brokers = folder / "brokers"
    brokers.mkdir(mode=0o700, exist_ok=True)
    listen, monitor = f"0.0.0.0:{nats.rpartition(':')[2]}", "127.0.0.1:8222"
    config = server_config("/data", listen=listen, monitor=monitor, keys=keys)
    write_secret(brokers / "nats.conf", config)
    write_secret(brokers / "users.acl", redis_users(keys) + "\n")
    seaweedfs.write_settings(brokers, keys)
    said = [
        f"services: DIGENRL_SECRETS_DIR={folder}/<role>",
        f"services: DIGENRL_API_TOKENS={folder}/api_tokens.json",
        f"brokers: {brokers} has nats.conf, users.acl, and the HOME of SeaweedFS",
        f"people: {folder}/viewer.token, operator.token, admin.token",
    ]
    if names:
        make_certificate(folder / "tls", names)
        said.append(f"TLS: DIGENRL_TLS_CERT={folder}/tls/cert.pem, DIGENRL_TLS_KEY=.../key.pem")
    return said


def make_certificate(folder: Path, names: Sequence[str]) -> None:
    """Make a key and a certificate that it signs itself, unless they are there.

    openssl does it: no package that DigenRL needs can, and one command is no reason for another.

    Raises:
        UserError: if openssl is not installed or refuses a name.
    """
    if (folder / "cert.pem").exists():
        return
    if shutil.which("openssl") is None:
        raise UserError("--tls: openssl is not installed; install it, or bring a certificate")
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "key.pem").touch(mode=0o600)
    kinds = ("IP" if name.replace(".", "").isdigit() or ":" in name else "DNS" for name in names)
    alternatives = ",".join(f"{kind}:{name}" for kind, name in zip(kinds, names, strict=True))
    argv = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-noenc", "-days", str(DAYS), "-subj", f"/CN={names[0]}",
        "-addext", f"subjectAltName={alternatives}", "-addext", "basicConstraints=critical,CA:TRUE",
        "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
    ]  # fmt: skip
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(f"--tls: openssl says: {made.stderr.strip().splitlines()[-1]}")
