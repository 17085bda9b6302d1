"""How a service runs: HTTP for people and probes, and its work, starting and stopping together."""

import asyncio
import contextlib
import signal
from collections.abc import Collection, Coroutine
from dataclasses import dataclass

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict

from shared.garbage import keep_what_is_there
from shared.http_guard import BODIES, Bodies, Guard, own_names
from shared.http_patience import PatientH11
from shared.problems import add_problems

GRACE_S = 10


@dataclass(slots=True)
class Health:
    """Alive is the process; ready is that it can do its work now."""

    ready: bool = False
    reason: str = "starting"

    def is_ready(self) -> None:
        self.ready, self.reason = True, "ready"
        keep_what_is_there()

    def is_not_ready(self, reason: str) -> None:
        self.ready, self.reason = False, reason


class ProbeView(BaseModel):
    """What a probe found."""

    model_config = ConfigDict(
        use_attribute_docstrings=True, json_schema_extra={"examples": [{"status": "ready"}]}
    )

    status: str
    """alive, ready, or why it cannot work now."""


def probes(health: Health) -> APIRouter:
    router = APIRouter(tags=["probes"])

    @router.get("/livez", operation_id="get_livez")
    def livez() -> ProbeView:
        """Whether the process answers at all."""
        return ProbeView(status="alive")

    not_ready = {"model": ProbeView, "description": "it cannot; the status says why"}

    @router.get("/readyz", operation_id="get_readyz", responses={503: not_ready})
    def readyz(response: Response) -> ProbeView:
        """Whether the service can do its work: 200 or 503 with the reason."""
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
    """The HTTP side of a service that has probes only."""
    app = FastAPI(title=f"digenrl {service}", docs_url=None, redoc_url=None)
    app.include_router(probes(health))
    add_problems(app)
    return app


async def serve(
    app: FastAPI,
    work: Coroutine[None, None, None],
    *,
    host: str,
    port: int,
    allowed_hosts: Collection[str] = (),
    bodies: Bodies = BODIES,
) -> None:
    """Serve ``app``, behind a guard, while ``work`` runs.

    SIGTERM ends both in order and returns. An error in ``work`` ends both and is raised, so that
    a service whose work has died never keeps answering its probes.
    """
    # uvicorn raises the signal that it caught once more when it has shut down. With no handler of
    # ours in place that second signal would kill the process before `work` could clean up.
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, lambda: None)

    config = uvicorn.Config(
        Guard(app, own_names(host, allowed_hosts), bodies),
        host=host,
        port=port,
        http=PatientH11,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)

    def stop_serving(_: asyncio.Task[None]) -> None:
        server.should_exit = True

    task = asyncio.create_task(work)
    task.add_done_callback(stop_serving)
    await server.serve()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
