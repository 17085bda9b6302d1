"""The API of a scheduler that stands by: it passes requests on to the one that commands."""

import ssl
from collections.abc import Callable

import httpx
from fastapi import FastAPI, HTTPException, Request, Response

from services.scheduler import limits
from shared.process.http_access import ON_BEHALF, check_routes
from shared.process.service import Health, worker_app

FORWARDED_HEADER = "digenrl-passed-on"
"""Header of a request that another scheduler passes on: it goes no further."""
REQUEST_HEADERS = ("authorization", "content-type", ON_BEHALF)
RESPONSE_HEADERS = ("content-type", "retry-after")


def standby_app(
    health: Health, commander: Callable[[], str], trusted: ssl.SSLContext | bool = True
) -> FastAPI:
    """Return its API: probes of its own, and what the scheduler that commands answers.

    Args:
        commander: returns the address of that scheduler's API; empty while none is known.
        trusted: verifies its certificate.
    """
    app = worker_app("scheduler", health)

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def pass_on(request: Request) -> Response:
        address = commander()
        if not address or FORWARDED_HEADER in request.headers:
            raise HTTPException(503, health.reason)
        headers = {
            name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers
        }
        try:
            async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
                answer = await client.request(
                    request.method, f"{address}{request.url.path}", params=request.query_params,
                    content=await request.body(), headers=headers | {FORWARDED_HEADER: "yes"},
                    timeout=limits.FORWARD_TIMEOUT_S,
                )  # fmt: skip
        except httpx.HTTPError as error:
            raise HTTPException(503, f"{health.reason}, and does not answer: {error}") from error
        kept = {name: answer.headers[name] for name in RESPONSE_HEADERS if name in answer.headers}
        return Response(answer.content, answer.status_code, kept)

    check_routes(app)
    return app
