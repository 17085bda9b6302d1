"""Connects to NATS, and logs while there is no connection."""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client

from shared.errors import Unavailable, UserError
from shared.limits import BROKER_CONNECT_S, ERROR_REPEAT_S
from shared.messages.rights import inbox_subject
from shared.telemetry import public

MIN_SERVER = (2, 11)
TIME_ERRORS = (9, 10)
"""OpenSSL's codes of a certificate that is not valid yet, or no longer: clocks are corrected, and
certificates renewed."""

log = structlog.get_logger()


async def open_connection(url: str, name: str, trusted: ssl.SSLContext | None = None) -> Client:
    """Return a client that reconnects by itself; ``trusted`` verifies a server with a certificate.

    Raises:
        Unavailable: if the server does not respond within some seconds.
        UserError: if the server refuses the user or the password, or its certificate is not signed
            by the given authority.
    """
    client, refused = Client(), asyncio.get_running_loop().create_future()
    errors = _Errors(public(url))

    async def on_error(error: Exception) -> None:
        errors.say(error)
        if (why := _refusal(error)) and not refused.done():
            refused.set_result(why)

    options = _client_options(url, trusted)
    connecting = asyncio.create_task(client.connect(url, name=name, error_cb=on_error, **options))
    try:
        await asyncio.wait(
            {connecting, refused}, timeout=BROKER_CONNECT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if refused.done():
            raise UserError(f"DIGENRL_NATS_URL: NATS at {errors.address} {refused.result()}")
        if not connecting.done():
            raise Unavailable(
                f"DIGENRL_NATS_URL: NATS at {errors.address} does not answer within "
                f"{BROKER_CONNECT_S:.0f} s"
            )
        await connecting
    except (UserError, Unavailable, asyncio.CancelledError):
        connecting.cancel()
        await client.close()
        raise
    except (nats.errors.Error, OSError) as error:
        await client.close()
        raise Unavailable(f"DIGENRL_NATS_URL: NATS at {errors.address}: {error}") from error
    log.info("connected", nats=errors.address)
    return client


def _client_options(url: str, trusted: ssl.SSLContext | None) -> dict[str, Any]:
    return {
        **({} if trusted is None else {"tls": trusted}),
        "inbox_prefix": inbox_subject(urlsplit(url).username or "anybody"),
        "connect_timeout": 2,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.5,
        "ping_interval": 5,
        "max_outstanding_pings": 2,
        "pending_size": -1,  # messages published during an outage are not replayed afterwards
        "allow_reconnect": True,
    }


def check_server(client: Client, address: str, *, may_be_open: bool) -> None:
    """Raises UserError if the server is too old, has no JetStream, or has no authentication."""
    info, version = client._server_info, client.connected_server_version
    at = f"DIGENRL_NATS_URL: NATS at {address}"
    if (version.major, version.minor) < MIN_SERVER:
        wanted = ".".join(str(part) for part in MIN_SERVER)
        raise UserError(f"{at} is {version}, too old; install {wanted} or newer")
    if not info.get("jetstream"):
        raise UserError(
            f"{at} has no JetStream, so it stores nothing; start it with the nats.conf of "
            "`digenrl keys init`"
        )
    if not info.get("auth_required") and not may_be_open:
        raise UserError(
            f"{at} has no authentication, so any client can command the run; start it with the "
            "nats.conf of `digenrl keys init`, or set DIGENRL_OPEN_BROKERS=1 on a laptop"
        )


def _refusal(error: Exception) -> str:
    """Return why another attempt would fail as well; empty if it may succeed."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code not in TIME_ERRORS:
        return f"has a certificate that DIGENRL_CA does not verify: {error.verify_message}"
    return (
        "refuses this user or password" if "authorization violation" in str(error).lower() else ""
    )


@dataclass(slots=True)
class _Errors:
    """Logs errors of the client, each at most once in `ERROR_REPEAT_S`."""

    address: str
    said: dict[str, float] = field(default_factory=dict)

    def say(self, error: Exception) -> None:
        text, now = str(error) or repr(error), time.monotonic()
        if now - self.said.get(text, -ERROR_REPEAT_S) >= ERROR_REPEAT_S:
            self.said[text] = now
            log.warning(
                "nats_unavailable", nats=self.address, setting="DIGENRL_NATS_URL", error=text
            )
