"""Runs a service: HTTP for people and probes, and its work, starting and stopping together."""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict
from starlette.types import ASGIApp

from shared.cancellation import stop
from shared.errors import UserError
from shared.limits import EXIT_TIMEOUT_S, MAX_THREADS, MAX_WAITING_CONNECTIONS, REQUEST_GRACE_S
from shared.process.http_access import Access, check_routes
from shared.process.http_api import add_problems
from shared.process.http_guard import DEFAULT_BODIES, BodyLimits, Guard, PatientH11, own_names

DEPTH = 12
"""Most places of one task that are logged."""

EXIT_KILLED = 143
"""Exit status, as a shell gives it, of a process that SIGTERM has ended."""


WILDCARD_HOSTS = ("0.0.0.0", "::", "")

ENDING = threading.Event()
"""Set by a stop signal: endless responses end then."""

log = structlog.get_logger()


@dataclass(slots=True)
class Health:
    """Readiness of a service, with the reason if it is not ready."""

    ready: bool = False
    reason: str = "starting"
    hangs: Callable[[], str] = lambda: ""
    """The hanging work of this process, if any: the process is about to end itself."""

    def is_ready(self) -> None:
        self.ready, self.reason = True, "ready"
        freeze_gc()

    def is_not_ready(self, reason: str) -> None:
        self.ready, self.reason = False, reason


class ProbeView(BaseModel):
    """Result of a probe."""

    model_config = ConfigDict(
        use_attribute_docstrings=True, json_schema_extra={"examples": [{"status": "ready"}]}
    )

    status: str
    """alive, ready, or why it cannot work now."""


def probes(health: Health) -> APIRouter:
    router = APIRouter(tags=["probes"])

    not_ready = {"model": ProbeView, "description": "it cannot; the status says why"}
    hangs = {"model": ProbeView, "description": "its work hangs; the status says which"}

    @router.get("/livez", operation_id="get_livez", responses={503: hangs})
    def livez(response: Response) -> ProbeView:
        """Liveness: 200, or 503 if work of the process hangs."""
        reason = health.hangs()
        response.status_code = 503 if reason else 200
        return ProbeView(status=reason or "alive")

    @router.get("/readyz", operation_id="get_readyz", responses={503: not_ready})
    def readyz(response: Response) -> ProbeView:
        """Readiness: 200, or 503 with the reason."""
        response.status_code = 200 if health.ready else 503
        return ProbeView(status=health.reason)

    text = {"text/plain": {"schema": {"type": "string"}, "example": "digenrl_step 12.0\n"}}

    @router.get(
        "/metrics",
        operation_id="get_metrics",
        response_class=Response,
        responses={200: {"content": text, "description": "in Prometheus' text format"}},
    )
    def metrics() -> Response:
        """Prometheus metrics of this process."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return router


def worker_app(service: str, health: Health) -> FastAPI:
    """Return the HTTP API of a service that has probes only."""
    app = FastAPI(title=f"digenrl {service}", docs_url=None, redoc_url=None)
    app.include_router(probes(health))
    add_problems(app)
    return app


@dataclass(frozen=True, slots=True)
class Listener:
    """A port that this process holds before any work begins; `serve` answers on it."""

    socket: socket.socket
    host: str
    url: str
    """Address that others reach it by: a server on all interfaces names its host."""
    tls: "Tls | None" = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Names the files of a certificate and its key, as PEM."""

    certificate: Path
    key: Path


def listen(host: str, port: int, *, tls: Tls | None = None, plain: bool = False) -> Listener:
    """Bind a port, 0 for any free one, and log it.

    Args:
        plain: other machines may reach it without TLS.

    Raises:
        UserError: if the port is occupied, ``host`` is no address of this
            machine, or others could read tokens on the way to it.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((host, port), family=family, backlog=MAX_WAITING_CONNECTIONS)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--port: {port} is occupied on {host}; choose another, or 0 for a free one"
            ) from error
        if error.errno == errno.EACCES:
            raise UserError(
                f"--port: {port} may not be used by this user; choose another"
            ) from error
        raise UserError(f"--host: cannot listen on {host!r}: {error.strerror}") from error
    # A connection inherits it. An answer is written in two parts, and without it the second waits
    # until the first is acknowledged, which a client does 40 ms later; asyncio sets it of none but
    # the sockets that it has made.
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    address, taken_port = server.getsockname()[:2]
    if tls is None and not plain and not ipaddress.ip_address(address).is_loopback:
        server.close()
        raise UserError(
            f"--host: {host} is reached from other machines, which can read tokens on the way; "
            "set DIGENRL_TLS_CERT and DIGENRL_TLS_KEY, or --plain-http if the network is private"
        )
    listener = Listener(server, host, _url(host, taken_port, tls), tls)
    log.info("listening", url=listener.url)
    return listener


def _url(host: str, port: int, tls: Tls | None) -> str:
    scheme = "http" if tls is None else "https"
    if host in WILDCARD_HOSTS:
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def give_threads() -> None:
    """Give blocking calls of this loop a thread each. asyncio has four more threads than the host
    has cores: on a small one, what a device does next would wait for a thread until objects are
    digested and on disk."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS, "service"))


async def serve(
    app: ASGIApp,
    work: Coroutine[Any, Any, object],
    *,
    listener: Listener,
    access: Access | None = None,
    allowed_hosts: Collection[str] = (),
    bodies: BodyLimits = DEFAULT_BODIES,
) -> None:
    """Serve ``app``, behind a guard, while ``work`` runs; both end when ``work`` ends.

    Without ``access`` it answers probes alone.

    SIGTERM ends both in order and returns, within `EXIT_TIMEOUT_S` even if threads of the process
    hang. An error in ``work`` ends both and is raised, so that a service whose work has died never
    keeps answering its probes."""
    # uvicorn raises the signal that it caught once more when it has shut down. With no handler of
    # ours in place that second signal would kill the process before `work` could clean up.
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, end_soon)
    give_threads()

    access = access or Access()
    if isinstance(app, FastAPI) and not access.is_open:
        check_routes(app)
    guarded = Guard(app, own_names(listener.host, allowed_hosts), bodies, access)
    server = Server(_configured(guarded, listener.tls))

    def stop_serving(_: object) -> None:
        server.should_exit = True

    task = asyncio.create_task(work)
    task.add_done_callback(stop_serving)
    try:
        await server.serve(sockets=[listener.socket])
    finally:  # uvicorn leaves with SystemExit where it cannot start
        [error] = await stop(task)
    if error is not None:
        raise error


def _configured(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=PatientH11,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
        log_level="warning",
        timeout_graceful_shutdown=REQUEST_GRACE_S,
    )


class Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        end_soon()
        super().handle_exit(sig, frame)


def end_soon() -> None:
    """End this process within `EXIT_TIMEOUT_S`, even if its threads hang.

    A thread that reads weights, or waits for a device, cannot be interrupted and would keep the
    process; its data can be rebuilt."""
    ENDING.set()
    timer = threading.Timer(EXIT_TIMEOUT_S, _give_up, (_running_loop(),))
    timer.daemon = True
    timer.start()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _give_up(loop: asyncio.AbstractEventLoop | None) -> None:
    """End this process, and log where each of its tasks still waits."""
    try:
        tasks = [] if loop is None else sorted(map(_where, asyncio.all_tasks(loop)))
        log.warning("ended_late", seconds=EXIT_TIMEOUT_S, tasks=tasks)
    finally:
        os._exit(EXIT_KILLED)


def _where(task: "asyncio.Task[Any]") -> str:
    """Return the lines of ours and of libraries at which a task waits, the innermost last."""
    places: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None and len(places) < DEPTH:
        frame = getattr(inner, "cr_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        inner = getattr(inner, "cr_await", None)
    return " > ".join(places)


def freeze_gc() -> None:
    """Modules and models stay until the end; to look through them for garbage stops a service for
    50 ms every now and then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700)  # Python's own, which a start raises: garbage may hold a device's memory
