"""Answers what cannot be shown: programs with a problem, browsers with a page that leads back."""

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from shared.errors import ContractError, IntegrityError, Unavailable, UserError
from shared.process.http_api import add_problems, problem

Render = Callable[..., Awaitable[HTMLResponse]]
"""Renders a page of a name, with its fields."""
Tell = Callable[[Request, Exception], JSONResponse]
"""Answers a fault with a problem."""
API_PREFIXES = ("/v1/", "/data/", "/static/")
"""Beginnings of addresses that are no pages."""
STORE_FAULT_STATUS = {
    Unavailable: 503, IntegrityError: 410, ContractError: 500, UserError: 422
}  # fmt: skip
"""Faults of the store, of its content or of a request, and their HTTP status."""


def add_error_pages(app: FastAPI, render: Render) -> None:
    """Respond to each error of ``app`` with a problem, or for a browser with a page."""
    add_problems(app)
    for fault, status in STORE_FAULT_STATUS.items():
        app.add_exception_handler(fault, _problem_of(status))
    for kind in (HTTPException, RequestValidationError, *STORE_FAULT_STATUS):
        tell = cast(Tell, app.exception_handlers[kind])
        app.add_exception_handler(kind, _shown(tell, render))


def _problem_of(status: int) -> Tell:
    return lambda _, error: problem(status, str(error))


def _shown(tell: Tell, render: Render) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def show(request: Request, error: Exception) -> Response:
        response = tell(request, error)
        if not _wants_page(request):
            return response
        try:
            page = await render(request, "error", sentence=_sentence(request, response))
        except tuple(STORE_FAULT_STATUS):
            return response  # the frame needs the store as well
        page.status_code = response.status_code
        return page

    return show


def _wants_page(request: Request) -> bool:
    is_asked = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    return is_asked and not request.url.path.startswith(API_PREFIXES)


def _sentence(request: Request, response: JSONResponse) -> str:
    detail = str(json.loads(bytes(response.body))["detail"])
    if detail == HTTPStatus.NOT_FOUND.phrase:
        return f"There is no page {request.url.path}."
    return f"{detail[:1].upper()}{detail[1:]}."
