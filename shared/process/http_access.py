"""Access over HTTP: the operations, the roles, and how a caller proves a role.

    Authorization: Bearer TOKEN   for programs; services know the sha256 of tokens, not tokens
    a cookie                      for browsers, in exchange for a one-time code

A request that proves nothing gets the probes alone.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.routing import BaseRoute, Route

from shared.errors import UserError
from shared.limits import MAX_SESSIONS, SESSION_S, SIGN_IN_CODE_S
from shared.process.http_api import Refusal, refusal
from shared.process.operations import OPERATIONS as OPERATIONS
from shared.process.operations import ROLES as ROLES
from shared.process.operations import Role as Role
from shared.process.operations import required_role as required_role

CALLER = "digenrl.caller"
"""Where a request's scope has who asks."""
ON_BEHALF = "digenrl-on-behalf"
"""Header with the name of the caller for whom the run's page forwards a request."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    role: Role

    def may(self, needs: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(needs)


@dataclass(frozen=True, slots=True)
class AuditedChange:
    """Caller and status of a change."""

    caller: Caller
    on_behalf: str
    operation: str
    client: str
    status: int


class TokenRecord(BaseModel):
    """A service's record of a token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Name of its owner, for the audit log."""
    role: Role
    sha256: str
    expires: float | None = None
    """Seconds of the Unix clock after which it is worth nothing."""


RECORDS = TypeAdapter(list[TokenRecord])


def secret_digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def new_secret() -> str:
    """Return 32 random bytes as text."""
    return secrets.token_urlsafe(32)


@dataclass(slots=True)
class TokenFile:
    """The tokens that a service accepts; a file that changes is read again."""

    path: Path
    _seen: tuple[int, int] = (0, 0)
    _records: list[TokenRecord] = field(default_factory=list)

    def records(self) -> list[TokenRecord]:
        """Return the records of tokens.

        Raises:
            UserError: if the file cannot be read or is no such file.
        """
        try:
            status = self.path.stat()
            version = status.st_mtime_ns, status.st_ino
            if version != self._seen:
                self._records = RECORDS.validate_json(self.path.read_bytes())
                self._seen = version
        except (OSError, ValidationError) as error:
            fault = error.strerror if isinstance(error, OSError) else "is no list of tokens"
            raise UserError(
                f"DIGENRL_API_TOKENS: {self.path}: {fault}; `digenrl keys init` makes one"
            ) from error
        return self._records

    def caller(self, token: str, now: float) -> Caller | None:
        """Return whose token it is; every record is compared, in constant time."""
        given, identity = secret_digest(token), None
        try:
            records = self.records()
        except UserError as error:
            log.error("tokens_unreadable", error=str(error))
            return None
        for record in records:
            same = hmac.compare_digest(given, record.sha256)
            if same and (record.expires is None or now < record.expires):
                identity = Caller(record.name, record.role)
        return identity


@dataclass(frozen=True, slots=True)
class _Proof:
    """The role of a code or a session, and its expiry."""

    caller: Caller
    until: float


@dataclass(slots=True)
class Access:
    """Decides who may do what at one service. By default every operation is refused."""

    tokens: TokenFile | None = None
    is_open: bool = False
    """Whether authentication is off: on a laptop."""
    is_encrypted: bool = False
    cookie: str = "digenrl"
    """Name of the cookie: a browser sends it to every port of a host."""
    clock: Callable[[], float] = lambda: time.monotonic()
    audit: "Callable[[AuditedChange], Awaitable[None]] | None" = None
    """Keeps requests that change something, in addition to the log, before their responses."""
    _codes: dict[str, _Proof] = field(default_factory=dict)
    _sessions: dict[str, _Proof] = field(default_factory=dict)

    def check(self, method: str, path: str, headers: Headers) -> Caller | None:
        """Return the caller; None if the operation needs no role.

        Raises:
            Refusal: with 401 if the caller proves nothing, with 403 if its role may not do it.
        """
        needs = required_role(method, path)
        if needs == "nothing" or needs == "code":
            return None
        caller = Caller("anybody", "admin") if self.is_open else self._caller(headers)
        if caller is None:
            raise Refusal(
                401,
                "authorization: send a token (Authorization: Bearer ...), or open the link that "
                "`digenrl up` has printed",
                {"www-authenticate": "Bearer"},
            )
        if not caller.may(needs):
            raise Refusal(403, f"authorization: this needs the role {needs}, not {caller.role}")
        return caller

    def new_code(self, caller: Caller) -> str:
        """Return a code that is worth a session, once, for ten minutes."""
        code = new_secret()
        _keep(self._codes, code, _Proof(caller, self.clock() + SIGN_IN_CODE_S), self.clock())
        return code

    def exchange(self, code: str) -> str:
        """Return the secret of a new session for a code.

        Raises:
            Refusal: if it is no code, or not any more.
        """
        proof = self._codes.pop(secret_digest(code), None)
        if proof is None or self.clock() >= proof.until:
            raise Refusal(401, "code: it was used or is too old; ask for another link")
        session = new_secret()
        until = self.clock() + SESSION_S
        _keep(self._sessions, session, _Proof(proof.caller, until), self.clock())
        return session

    def say(self) -> None:
        """Log if every caller is refused, or none is.

        Raises:
            UserError: if there are no tokens where they should be.
        """
        if self.tokens is not None:
            self.tokens.records()
        elif self.is_open:
            log.warning("api_open", hint="whoever reaches the port may do anything")
        else:
            log.info(
                "api_closed",
                hint="only /livez and /readyz answer: set DIGENRL_API_TOKENS to a file of `digenrl "
                "keys init`, or DIGENRL_OPEN_API=1 on a laptop",
            )

    def _caller(self, headers: Headers) -> Caller | None:
        given = headers.get("authorization")
        if given is not None:
            scheme, _, token = given.partition(" ")
            if self.tokens is None or scheme.lower() != "bearer":
                return None
            return self.tokens.caller(token.strip(), time.time())
        session = cookie_parser(headers.get("cookie", "")).get(self.cookie)
        proof = None if session is None else self._sessions.get(secret_digest(session))
        return None if proof is None or self.clock() >= proof.until else proof.caller


def _keep(kept: dict[str, _Proof], secret: str, proof: _Proof, now: float) -> None:
    """Keep a proof under the digest of its secret. Expired proofs are removed, and the oldest of
    this caller beyond the limit: no caller can push out another caller's."""
    for digest in [digest for digest, each in kept.items() if now >= each.until]:
        del kept[digest]
    own = [digest for digest, each in kept.items() if each.caller == proof.caller]
    for digest in own[: max(0, len(own) + 1 - MAX_SESSIONS)]:
        del kept[digest]
    kept[secret_digest(secret)] = proof


def check_routes(app: FastAPI) -> None:
    """Raises AssertionError for a route of ``app`` that `OPERATIONS` does not have."""
    unknown = [each for each in route_operations(app.routes) if each not in OPERATIONS]
    assert not unknown, f"who may do {unknown}? shared/process/operations.py has to say"


def route_operations(routes: Iterable[BaseRoute]) -> list[str]:
    """Return the operations of these routes, as `OPERATIONS` names them."""
    operations: list[str] = []
    for route in routes:
        included = getattr(route, "original_router", None)  # FastAPI looks into it when asked
        if included is not None:
            operations += route_operations(included.routes)
            continue
        assert isinstance(route, Route), route
        operations += [f"{each} {route.path}" for each in (route.methods or ()) if each != "HEAD"]
    return operations


class CodeView(BaseModel):
    """A link for a browser."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={"examples": [{"path": "/sign-in?code=Zm9v", "seconds": 600.0}]},
    )

    path: str
    """Path that a browser opens once, to be signed in as the caller who requested it."""
    seconds: float
    """How long it works."""


def sign_in(access: Access, *, home: str = "/docs") -> APIRouter:
    """Return the routes that sign a browser in, which is then sent to ``home``."""
    router = APIRouter()

    @router.post("/v1/codes", operation_id="make_code", status_code=201, tags=["access"])
    def code(request: Request) -> CodeView:
        """Make a link that signs a browser in, once, with the caller's own role."""
        return CodeView(
            path=f"/sign-in?code={access.new_code(request.scope[CALLER])}", seconds=SIGN_IN_CODE_S
        )

    @router.get("/sign-in", include_in_schema=False)
    def enter(request: Request, code: str = Query("", max_length=100)) -> Response:
        try:
            session = access.exchange(code)
        except Refusal as refused:
            return refusal(refused, request.scope)
        answer = RedirectResponse(home, 303, {"cache-control": "no-store"})
        answer.headers["referrer-policy"] = "no-referrer"
        answer.set_cookie(
            access.cookie, session, max_age=int(SESSION_S), httponly=True, samesite="strict",
            secure=access.is_encrypted,
        )  # fmt: skip
        return answer

    return router


def token_file(records: Iterable[TokenRecord]) -> str:
    """Return the text of a file of tokens."""
    return json.dumps([record.model_dump() for record in records], indent=1)
