"""Lists the operations of all services over HTTP, and the role that each needs."""

import re
from collections.abc import Mapping
from typing import Literal, get_args

from starlette.routing import Match, Route

Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do what those before it may."""
RequiredRole = Role | Literal["nothing", "code"]

OPERATIONS: Mapping[str, RequiredRole] = {
    "GET /livez": "nothing",
    "GET /readyz": "nothing",
    "GET /sign-in": "code",
    "GET /metrics": "viewer",
    "GET /docs": "viewer",
    "GET /docs/{name}": "viewer",
    "GET /openapi.json": "viewer",
    "GET /v1/run": "viewer",
    "GET /v1/status": "viewer",
    "GET /v1/logs": "viewer",
    "GET /v1/load": "viewer",
    "GET /v1/workers": "viewer",
    "GET /v1/batches": "viewer",
    "GET /v1/batches/{batch}": "viewer",
    "GET /v1/batches/{batch}/usage": "viewer",
    "GET /v1/batches/{batch}/timeline": "viewer",
    "GET /v1/versions": "viewer",
    "GET /v1/tag": "viewer",
    "GET /v1/dead-letters": "viewer",
    "GET /v1/dead-letters/{number}": "viewer",
    "GET /v1/evaluation": "viewer",
    "GET /v1/events": "viewer",
    "GET /v1/batches/{batch}/groups": "viewer",
    "GET /v1/batches/{batch}/samples": "viewer",
    "GET /v1/batches/{batch}/samples/{group}/{sample}": "viewer",
    "GET /v1/batches/{batch}/samples/{group}/{sample}/media": "viewer",
    "GET /v1/recipe": "viewer",
    "GET /v1/curves": "viewer",
    "GET /v1/evaluations": "viewer",
    "GET /v1/evaluations/{version}": "viewer",
    "GET /v1/media/{name}": "viewer",
    "POST /v1/samples": "operator",
    "GET /v1/audit": "viewer",
    "GET /v1/storage": "viewer",
    "GET /v1/plan": "viewer",
    "GET /v1/versions/{version}/adapter": "operator",
    "POST /score": "viewer",
    "POST /v1/codes": "viewer",
    "POST /v1/tag": "operator",
    "POST /v1/run/pause": "operator",
    "POST /v1/run/pause-at-failure": "operator",
    "POST /v1/run/resume": "operator",
    "POST /v1/run/stop": "operator",
    "POST /v1/workers/{worker}/drain": "operator",
    "POST /v1/workers/{worker}/undrain": "operator",
    "POST /v1/dead-letters/{number}/retry": "operator",
    "POST /v1/dead-letters/{number}/drop": "operator",
    # Of the page (digenrl/view): one run.
    "GET /": "viewer",
    "GET /samples": "viewer",
    "GET /batches": "viewer",
    "GET /sample": "viewer",
    "GET /try": "viewer",
    "GET /curves": "viewer",
    "GET /evaluations": "viewer",
    "GET /versions": "viewer",
    "GET /workers": "viewer",
    "GET /timeline": "viewer",
    "GET /schedule": "viewer",
    "GET /logs": "viewer",
    "GET /recipe": "viewer",
    "GET /letters": "viewer",
    "GET /plan": "viewer",
    "GET /data/sampling": "viewer",
    "GET /data/timeline": "viewer",
    "GET /static/{name}": "viewer",
    # Of the page: all runs.
    "GET /runs": "viewer",
    "GET /v1/runs": "viewer",
    "GET /v1/runs/{name}/pictures/{kind}": "viewer",
    "POST /v1/runs/{name}/notes": "operator",
    "POST /v1/runs/{name}/copies": "operator",
    "POST /v1/runs/{name}/start": "operator",
    "GET /compare": "viewer",
    "GET /compare/blind": "viewer",
    # Of a scheduler that stands by: it says who commands.
    "GET /v1/{path:path}": "viewer",
    "POST /v1/{path:path}": "viewer",
}
"""The role that each operation of any service needs. A service with another one does not start."""

RUN_ADDRESS = re.compile(r"/runs/[A-Za-z0-9_.-]+(?=/)")
"""Beginning of the addresses of one of many runs: what follows is an address of a page of one."""
DEFAULT_ROLE: Role = "viewer"
"""The role for a request without an operation: its response is 404."""


_ROUTES = tuple(
    (Route(path, endpoint=lambda _: None, methods=[method]), needs)
    for operation, needs in OPERATIONS.items()
    for method, path in [operation.split(" ")]
)


def required_role(method: str, path: str) -> RequiredRole:
    """Return what a request needs, below the address of one of many runs as well."""
    path = split_run(path)[1]
    scope = {"type": "http", "method": method, "path": path, "path_params": {}}
    return next(
        (needs for route, needs in _ROUTES if route.matches(scope)[0] is Match.FULL), DEFAULT_ROLE
    )


def split_run(path: str) -> tuple[str, str]:
    """Return the address of one of many runs, and the path below it.

    >>> split_run("/runs/digits/v1/run"), split_run("/v1/run")
    (('/runs/digits', '/v1/run'), ('', '/v1/run'))
    """
    found = RUN_ADDRESS.match(path)
    return (found[0], path[found.end() :]) if found else ("", path)
