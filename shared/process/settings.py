"""Addresses and credentials of the other services: command line over environment over secrets.

DIGENRL_NATS_URL=nats://user:password@host:4222
DIGENRL_SECRETS_DIR=/run/secrets        # one file per setting, named digenrl_<setting>
"""

import os
import secrets
import socket
import ssl
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import structlog
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

from shared.bus.bus import Bus
from shared.errors import UserError
from shared.messages.records import HOME, Token
from shared.models.memory import Residence
from shared.process.http_access import Access, TokenFile
from shared.process.service import Listener, Tls, listen
from shared.process.trust import trusted_with
from shared.store import CacheSettings, StoreSettings
from shared.telemetry import public

if TYPE_CHECKING:
    from shared.run.versions import VersionIndex

log = structlog.get_logger()


def _names(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Split ``a,b`` of a variable into names."""
    return tuple(given.replace(",", " ").split()) if isinstance(given, str) else given


def _host_and_port(given: Any) -> Any:
    """Split ``host:port`` of a variable."""
    if not isinstance(given, str):
        return given
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("not host:port")
    return host.strip("[]"), int(port)


def _broker_url(*schemes: str) -> AfterValidator:
    """Refuse an address that no client can connect to: a service would try it without end."""

    def check(given: SecretStr) -> SecretStr:
        try:
            parts = urlsplit(given.get_secret_value())
            if parts.scheme in schemes and parts.hostname and parts.port != 0:
                return given
        except ValueError:
            pass  # the port is no number, or above 65535
        raise ValueError(f"not an address as {schemes[0]}://user:password@host:port")

    return AfterValidator(check)


def _cache_folder(given: str) -> str:
    """Return auto, off or the absolute path of a folder; raise ValueError for anything else."""
    if given not in ("auto", "off") and not Path(given).is_absolute():
        raise ValueError("neither auto, off, nor the absolute path of a folder")
    return given


def _default_cache() -> Path:
    """Return a folder below the user's cache, which need not exist or be of any use."""
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given or os.path.expanduser("~/.cache")) / "digenrl"  # noqa: PTH111 -- never raises


HostCacheFolder = Annotated[str, AfterValidator(_cache_folder)]


class SecretSettings(BaseSettings):
    """Settings with secrets in files of the folder ``_secrets_dir``, by default
    DIGENRL_SECRETS_DIR."""

    model_config = SettingsConfigDict(env_prefix="digenrl_", extra="ignore", frozen=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = getattr(file_secret_settings, "secrets_dir", None)
        folder = given or os.environ.get("DIGENRL_SECRETS_DIR")
        return init_settings, env_settings, SecretsSettingsSource(settings_cls, folder)


class TrustSettings(SecretSettings):
    """Settings of a process that asks servers with certificates."""

    ca: str | None = None
    """Certificates, as PEM text, by which servers are verified besides those that the machine
    trusts."""

    @property
    def trusted(self) -> ssl.SSLContext:
        """Trust settings for servers; raises UserError if ``ca`` is no certificate."""
        return trusted_with(self.ca)


class Endpoints(TrustSettings):
    """Secrets are never part of a log line: they print as asterisks."""

    nats_url: Annotated[SecretStr, _broker_url("nats", "tls")] = SecretStr("nats://127.0.0.1:4222")
    redis_url: Annotated[SecretStr, _broker_url("redis", "rediss")] = SecretStr(
        "redis://127.0.0.1:6379"
    )
    store_url: str = "file:///var/lib/digenrl/objects"
    s3_endpoint: str | None = None
    store_folder: Path | None = None
    """Folder of this host where the S3 service keeps what it stores."""
    s3_access_key: SecretStr | None = None
    s3_secret_key: SecretStr | None = None
    s3_session_token: SecretStr | None = None
    open_brokers: bool = False
    """Whether brokers without authentication are allowed: on a laptop."""

    @property
    def store(self) -> StoreSettings:
        return StoreSettings(
            url=self.store_url,
            endpoint=self.s3_endpoint,
            folder=self.store_folder,
            access_key=self.s3_access_key,
            secret_key=self.s3_secret_key,
            session_token=self.s3_session_token,
            ca=self.ca,
        )

    @property
    def store_place(self) -> str:
        """Address of the store, for a log."""
        place = public(self.store_url)
        return f"{place} at {public(self.s3_endpoint)}" if self.s3_endpoint else place

    def say_store(self) -> None:
        """Log the store if it is the default: other hosts do not see its folder."""
        if "store_url" not in self.model_fields_set:
            log.warning(
                "store_by_default",
                store=self.store_place,
                hint="a folder of this host; set DIGENRL_STORE_URL to where the whole run looks",
            )


class HttpSettings(SecretSettings):
    """Settings of a process's HTTP API."""

    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = ()
    """Accepted host names of the HTTP API, in addition to the machine's own; `*.name` is every name
    below."""
    api_tokens: Path | None = None
    """File of the tokens that it accepts; None: it answers probes alone."""
    open_api: bool = False
    """Whether every client that reaches the port may do anything: on a laptop."""
    plain_http: bool = False
    """Whether other machines may reach it without TLS: in a private network."""
    tls_cert: Path | None = None
    """Certificate with which it answers, as PEM."""
    tls_key: Path | None = None

    def listen(self, host: str, port: int) -> Listener:
        """Take a port; raises UserError as `listen` does, or if half of TLS is set."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("DIGENRL_TLS_CERT, DIGENRL_TLS_KEY: set both, or none")
        tls = Tls(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not os.access(path, os.R_OK):
                raise UserError(f"DIGENRL_TLS_CERT, DIGENRL_TLS_KEY: {path} cannot be read")
        return listen(host, port, tls=tls, plain=self.plain_http)

    def access(self, run: str) -> Access:
        """Return who may do what.

        Raises:
            UserError: if there are no tokens where they should be.
        """
        access = Access(
            tokens=None if self.api_tokens is None else TokenFile(self.api_tokens),
            is_open=self.open_api,
            is_encrypted=self.tls_cert is not None,
            cookie=f"digenrl-{run}",
        )
        access.say()
        return access


class ClientSettings(TrustSettings):
    """Settings of a program that asks a service."""

    api_token: SecretStr | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its requests."""
        token = self.api_token
        return {} if token is None else {"authorization": f"Bearer {token.get_secret_value()}"}


class ServiceSettings(Endpoints, HttpSettings):
    run: Token
    worker: Token = Field(default_factory=lambda: _default_worker())
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """Port of its HTTP API; 0 takes a free one."""
    stay: bool = False
    """Whether a worker outlives its finished run."""
    hang_s: float | None = Field(default=None, gt=0)
    """Seconds after which a worker ends itself whose device has not finished a piece of work; None:
    it follows from `schedule.slot_deadline_s`, or from what such work took before."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory that this worker may take of its device, where others use it too."""
    rollout_memory: Residence | None = None
    """Overrides `rollout.memory` for this rollout worker or evaluator: it changes no sample."""
    host_cache: HostCacheFolder = "auto"
    """Folder in which this host caches the weights that its processes read, so that each object
    is fetched once; off; auto: in the user's cache, unless the store is a folder already."""
    host_cache_gib: float = Field(default=32, gt=0)
    """Most of it that the host keeps."""
    otlp_endpoint: str = ""
    """Address of an OpenTelemetry collector, `http://collector:4318`, that gets traces over HTTP;
    empty: nothing is traced."""
    otlp_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the groups that are traced; the scheduler's decides."""
    site: Token = HOME
    """Hosts of one name have a fast network among them, and share the line to other sites."""
    share_at: Annotated[tuple[str, int] | None, NoDecode, BeforeValidator(_host_and_port)] = None
    """Host and port, `10.0.0.5:7800`, at which other hosts read what this one's cache holds; None:
    it passes nothing on, and reads from the store alone."""

    @property
    def cache(self) -> CacheSettings | None:
        """This host's cache; None if it is off.

        Raises:
            UserError: if it is off and should be shared.
        """
        in_folder = self.store_url.startswith("file:")
        if self.host_cache == "off" or (self.host_cache == "auto" and in_folder):
            if self.share_at is not None:
                raise UserError(
                    "share_at: what hosts pass on lies in their caches, and host_cache is "
                    f"{self.host_cache} (of a store that is a folder, off); name a folder"
                )
            return None
        chosen = self.host_cache != "auto"
        return CacheSettings(
            folder=Path(self.host_cache) if chosen else _default_cache(),
            is_chosen=chosen,
            limit=int(self.host_cache_gib * 2**30),
            share_at=self.share_at,
            site=self.site,
        )

    def connect_bus(self) -> AbstractAsyncContextManager[Bus]:
        url = self.nats_url.get_secret_value()
        trusted = self.trusted if self.ca is not None else None
        return Bus.connect(
            url, run=self.run, name=self.worker, trusted=trusted, may_be_open=self.open_brokers
        )

    def connect_index(self) -> "AbstractAsyncContextManager[VersionIndex]":
        from shared.run.versions import VersionIndex  # Redis' client, which few services need

        return VersionIndex.connect(
            self.redis_url.get_secret_value(),
            run=self.run, ca=self.ca, may_be_open=self.open_brokers,
        )  # fmt: skip


def _default_worker() -> str:
    """Return a name for this process: containers may share their host's name and have the same
    process ids."""
    name = "".join(char if char.isalnum() else "-" for char in socket.gethostname()).strip("-")
    return f"{(name or 'worker')[:45]}-{os.getpid()}-{secrets.token_hex(3)}"
