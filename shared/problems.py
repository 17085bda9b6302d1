"""Errors of an HTTP API as problem+json (RFC 9457)."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

PROBLEM_JSON = "application/problem+json"


class Problem(BaseModel):
    """What went wrong, and with what."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


def add_problems(app: FastAPI) -> None:
    """Whatever is raised in ``app`` for the caller is answered as a problem."""
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(RequestValidationError, _validation_problem)
    app.add_exception_handler(Exception, _unexpected_problem)


def problem(status: int, detail: str) -> JSONResponse:
    said = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(said.model_dump(), status, media_type=PROBLEM_JSON)


def _http_problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, str(error.detail))


def _validation_problem(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return problem(422, f"{where}: {first['msg']}")


def _unexpected_problem(_: Request, error: Exception) -> JSONResponse:
    return problem(500, f"{type(error).__name__}; the log of this service has more")
