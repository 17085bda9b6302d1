"""Common to every HTTP API: errors as problem+json (RFC 9457), and the page `/docs`, which needs no
other host."""

import html
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.resources import files
from string import Template
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import Scope

Limit = Annotated[int, Query(ge=1, le=200, description="how many at most")]
Before = Annotated[
    int | None, Query(ge=0, lt=2**31, description="only those with a smaller number")
]
BatchNumber = Annotated[int, Path(ge=0, lt=2**31, description="number of the batch")]
PROBLEM_JSON = "application/problem+json"
REF = "#/components/schemas/Problem"
FASTAPIS = (REF, "#/components/schemas/HTTPValidationError")
"""FastAPI's default schema of an error."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """A request is refused before a route is called."""

    status: int
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)


SIGN_IN = Template((files("shared.process") / "sign_in.html").read_text())
SIGN_IN_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


class Problem(BaseModel):
    """Description of the fault."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Not Found",
                    "status": 404,
                    "detail": "batch 9 has not begun",
                }
            ]
        },
    )

    type: str = "about:blank"
    """Constant: the status defines the kind of problem."""
    title: str
    """The status in words."""
    status: int
    """The status of the response."""
    detail: str
    """The field that is wrong, what is wrong with it, and what would be right."""


COMMON_ERRORS = {
    401: "nothing proves who asks; `/livez` and `/readyz` ask nobody",
    421: "the host's name is none of this service's",
}
CHANGE_ERRORS = {
    403: "a page of another site asks, or the caller's role may not do this",
    413: "the body is too long",
    415: "the body is of another type",
    422: "the request is not understood",
}
"""Refused before a route is called (shared/process/http_guard.py)."""
BAD_REQUEST_TEXT = "the request is not understood"


STATUS_TEXTS = {
    404: "there is no such thing",
    409: "the run is not in a state for this",
    410: "it was deleted, as nothing needs it any more; the detail says by which rule",
    503: "what has to answer does not; repeat the request",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a route's errors, in addition to the errors of every route."""
    return {status: {"model": Problem, "description": STATUS_TEXTS[status]} for status in statuses}


PATTERN_TEXTS = {"extra_forbidden": "is unknown; leave it out"}
"""Remedies that errors show, by the pattern that a value does not match; modules add theirs."""


def existing(value: T | None, otherwise: str) -> T:
    """Return what was found.

    Raises:
        HTTPException: with 404, if nothing was.
    """
    if value is None:
        raise HTTPException(404, otherwise)
    return value


def add_problems(app: FastAPI) -> None:
    """Respond to each error of ``app`` with a problem, and document it."""
    document = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = with_problems(document())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(RequestValidationError, _validation_problem)
    app.add_exception_handler(Exception, _unexpected_problem)


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    problem_body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(problem_body.model_dump(), status, headers, media_type=PROBLEM_JSON)


def refusal(refused: Refusal, scope: Scope) -> Response:
    """Return the response to a refused request: a problem, or for a browser without a session a
    page that explains how to get a link."""
    connection = HTTPConnection(scope)
    reads_pages = scope["method"] == "GET" and "text/html" in connection.headers.get("accept", "")
    if refused.status != 401 or not reads_pages:
        return problem(refused.status, refused.detail, refused.headers)
    page = SIGN_IN.substitute(address=html.escape(str(connection.base_url).rstrip("/")))
    return HTMLResponse(page, 401, {**refused.headers, "content-security-policy": SIGN_IN_POLICY})


def _http_problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, str(error.detail), error.headers)


def _validation_problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    pattern = first.get("ctx", {}).get("pattern", first["type"])
    return problem(422, f"{where}: {PATTERN_TEXTS.get(pattern, first['msg'])}")


def _unexpected_problem(_: Request, error: Exception) -> JSONResponse:
    return problem(500, f"{type(error).__name__}; the log of this service has more")


def with_problems(schema: dict[str, Any]) -> dict[str, Any]:
    """A description of an API whose errors are problems, including the guard's."""
    for operations in schema["paths"].values():
        for method, operation in operations.items():
            _describe_errors(operation, changes=method == "post")
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return schema


def _describe_errors(operation: dict[str, Any], *, changes: bool) -> None:
    refusals = COMMON_ERRORS | (CHANGE_ERRORS if changes else {})
    for status, description in refusals.items():
        operation["responses"].setdefault(str(status), {"description": description})
    for status, response in operation["responses"].items():
        if response["description"] == "Validation Error":  # as FastAPI calls it
            response["description"] = refusals.get(int(status), BAD_REQUEST_TEXT)
        if _is_problem(status, response):
            response["content"] = {PROBLEM_JSON: {"schema": {"$ref": REF}}}


def _is_problem(status: str, response: dict[str, Any]) -> bool:
    """Whether an error has no model of its own."""
    described = [content.get("schema", {}) for content in response.get("content", {}).values()]
    return int(status) >= 400 and all(each.get("$ref") in (None, *FASTAPIS) for each in described)


ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
"""Files of Swagger UI that the page loads, from the package fastapi-offline."""


def add_docs(app: FastAPI) -> None:
    """Show ``app``'s own description of itself, with a form for every route."""

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url=app.openapi_url or "",
            title=app.title,
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="/docs/favicon.png",
        )
        # Nobody's page may lay it under its own and have a person press its buttons.
        page.headers["content-security-policy"] = "frame-ancestors 'none'"
        return page

    @app.get("/docs/{name}", include_in_schema=False)
    def asset(name: str) -> FileResponse:
        if name not in ASSETS:
            raise HTTPException(404, f"/docs has no {name[:100]!r}")
        path = pathlib.Path(str(files("fastapi_offline") / "static" / name))
        return FileResponse(path, media_type=ASSETS[name])
