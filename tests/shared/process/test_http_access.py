"""Who may do what over HTTP: every operation of the table, with every role and with none."""

import hmac
from pathlib import Path
from typing import cast

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.datastructures import Headers
from structlog.testing import capture_logs

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.evaluation.progress import Progress, routes
from digenrl.local.running.fleet import FolderOfRuns
from digenrl.local.running.home import all_runs_app
from digenrl.local.secrets.tokens import Tokens, load_tokens
from digenrl.view.pages import View
from digenrl.view.server import create_app as page_app
from services.reward.scorer import WeightedScorer
from services.reward.server import create_app as scorer_app
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.standby import standby_app
from shared import limits
from shared.errors import UserError
from shared.process.http_access import (
    CALLER,
    OPERATIONS,
    ROLES,
    Access,
    Caller,
    Role,
    TokenFile,
    TokenRecord,
    check_routes,
    required_role,
    route_operations,
    secret_digest,
    sign_in,
    token_file,
)
from shared.process.http_api import Refusal, add_docs, add_problems
from shared.process.http_guard import Guard, own_names
from shared.process.service import Health, listen, probes, worker_app
from shared.process.settings import HttpSettings

ASKS: tuple[Role | None, ...] = (None, *ROLES)


def asked(operation: str) -> tuple[str, str]:
    """A method and a path of it."""
    method, path = operation.replace("{path:path}", "other").split()
    fields = {
        "name": "x",
        "batch": 3,
        "number": 3,
        "version": 3,
        "action": "pause",
        "worker": "x",
        "group": 0,
        "sample": 0,
        "kind": "after",
    }
    return method, path.format(**fields)


def every_app() -> list[FastAPI]:
    """Every service that answers HTTP, as it is made."""
    evaluator = worker_app("evaluation", Health())
    evaluator.include_router(routes(Progress()))
    scorer = WeightedScorer("jpeg", 1.0, None)  # type: ignore[arg-type]
    scheduler = cast(Scheduler, type("AScheduler", (), {"health": Health()}))
    scheduling = [create_app(scheduler), standby_app(Health(), str)]
    view = View(RunHistory(None, "run"), LiveRun("", None))  # type: ignore[arg-type]
    pages = [page_app(view, Access()), all_runs_app(FolderOfRuns(Path("runs")), Access())]
    return [*scheduling, evaluator, scorer_app(scorer, Health()), *pages]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return load_tokens(tmp_path)


@pytest.fixture
def access(tokens: Tokens) -> Access:
    return Access(TokenFile(tokens.folder / "api_tokens.json"))


@pytest.fixture
def app(access: Access) -> FastAPI:
    """Answers every operation of the table with who has asked."""
    app = FastAPI(docs_url=None, openapi_url=None)
    add_problems(app)

    def answer(request: Request) -> str:
        caller = request.scope[CALLER]
        calls.append(request.url.path)
        return "nobody" if caller is None else caller.role

    calls: list[str] = []
    app.state.calls = calls
    app.include_router(sign_in(access))
    for operation in OPERATIONS:
        method, path = operation.split()
        if operation not in route_operations(app.routes):
            app.add_api_route(path, answer, methods=[method])
    return app


@pytest.fixture
def client(app: FastAPI, access: Access) -> TestClient:
    guard = Guard(app, own_names("127.0.0.1"), access=access)
    return TestClient(guard, base_url="http://localhost", follow_redirects=False)


def test_every_route_of_every_service_is_in_the_table_and_every_entry_is_a_route() -> None:
    apps = every_app()
    for app in apps:
        check_routes(app)
    assert {each for app in apps for each in route_operations(app.routes)} == set(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_of_one_of_many_runs_needs_what_it_needs_at_the_run_s_own_page(
    operation: str,
) -> None:
    method, path = operation.split()
    at = path.replace("{path:path}", "x/y/z").replace("{", "").replace("}", "")
    assert required_role(method, f"/runs/a-run{at}") == required_role(method, at)
    assert required_role(method, f"/runs/a-run/runs/another{at}") == "viewer"


def test_a_service_with_a_route_that_is_not_in_the_table_does_not_start() -> None:
    app = worker_app("reward", Health())
    app.add_api_route("/v1/secrets", lambda: "", methods=["GET"])
    with pytest.raises(AssertionError, match="GET /v1/secrets"):
        check_routes(app)


@pytest.mark.parametrize("role", ASKS)
def test_each_role_may_do_what_the_table_says_and_no_more(
    client: TestClient, tokens: Tokens, role: Role | None
) -> None:
    given = {} if role is None else tokens.headers(role)
    for operation, needs in OPERATIONS.items():
        answer = client.request(*asked(operation), headers=given)
        if needs == "nothing":
            assert answer.status_code == 200, operation
        elif needs == "code" or role is None:
            assert answer.status_code == 401, operation
        elif ROLES.index(role) < ROLES.index(needs):
            assert answer.status_code == 403, operation
            assert f"needs the role {needs}, not {role}" in answer.json()["detail"]
        else:
            assert answer.is_success, operation


def test_nobody_without_a_token_gets_more_than_the_two_probes(client: TestClient) -> None:
    answered = set()
    for operation in (*OPERATIONS, "GET /v1/nowhere", "PUT /v1/run", "GET /", "TRACE /docs"):
        answer = client.request(*asked(operation))
        if answer.status_code != 401:
            answered.add(operation)
        elif operation != "GET /sign-in":
            assert answer.headers["www-authenticate"] == "Bearer"
    assert answered == {"GET /livez", "GET /readyz"}


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Basic {viewer}", "{viewer}", "Bearer {viewer}x",
     "Bearer {digest}"],
)  # fmt: skip
def test_a_wrong_token_proves_nothing(client: TestClient, tokens: Tokens, header: str) -> None:
    viewer = tokens.token("viewer")
    given = header.format(viewer=viewer, digest=secret_digest(viewer))
    assert client.get("/v1/run", headers={"authorization": given}).status_code == 401


def test_a_token_is_compared_with_every_record_in_constant_time(
    client: TestClient, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(given: str, known: str) -> bool:
        compared.append(given)
        return given == known

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert client.get("/v1/run", headers=tokens.headers("viewer")).status_code == 200
    assert compared == [secret_digest(tokens.token("viewer"))] * len(ROLES)


def test_the_file_of_a_service_holds_no_token_and_what_holds_one_is_its_owners_alone(
    tokens: Tokens,
) -> None:
    accepted = (tokens.folder / "api_tokens.json").read_text()
    for role in ROLES:
        path = tokens.folder / f"{role}.token"
        assert tokens.token(role) not in accepted and path.stat().st_mode & 0o777 == 0o600
    assert tokens.folder.stat().st_mode & 0o777 == 0o700
    again = load_tokens(tokens.folder.parent)
    assert [again.token(role) for role in ROLES] == [tokens.token(role) for role in ROLES]


def test_tokens_are_changed_by_changing_the_file(client: TestClient, tokens: Tokens) -> None:
    path = tokens.folder / "api_tokens.json"
    old = tokens.headers("viewer")
    assert client.get("/v1/run", headers=old).status_code == 200
    ann = TokenRecord(name="ann", role="viewer", sha256=secret_digest("ann's"))
    bob = TokenRecord(name="bob", role="admin", sha256=secret_digest("bob's"), expires=1.0)
    records = [ann, bob]
    path.write_text(token_file(records))
    assert client.get("/v1/run", headers=old).status_code == 401
    assert client.get("/v1/run", headers={"authorization": "Bearer ann's"}).status_code == 200
    assert client.get("/v1/run", headers={"authorization": "Bearer bob's"}).status_code == 401
    path.write_text("[{]")
    assert client.get("/v1/run", headers={"authorization": "Bearer ann's"}).status_code == 401


def test_a_service_does_not_start_without_the_tokens_that_it_was_promised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"DIGENRL_API_TOKENS: .*keys.json: No such file"):
        HttpSettings(api_tokens=tmp_path / "keys.json").access("digits")
    (tmp_path / "keys.json").write_text("{}")
    with pytest.raises(UserError, match="is no list of tokens"):
        HttpSettings(api_tokens=tmp_path / "keys.json").access("digits")


# --- browsers ------------------------------------------------------------------------------------


def link(client: TestClient, tokens: Tokens, role: Role = "operator") -> str:
    answer = client.post("/v1/codes", headers=tokens.headers(role))
    assert answer.status_code == 201
    path: str = answer.json()["path"]
    return path


def test_a_link_signs_in_once_with_a_cookie_that_no_script_and_no_other_site_gets(
    client: TestClient, tokens: Tokens
) -> None:
    path = link(client, tokens)
    answer = client.get(path)
    assert answer.status_code == 303 and answer.headers["location"] == "/docs"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert client.get("/v1/run").json() == "operator"
    assert client.post("/v1/run/pause").json() == "operator"
    evil = {"sec-fetch-site": "cross-site"}
    assert client.post("/v1/run/stop", headers=evil).status_code == 403
    client.cookies.clear()
    assert client.get("/v1/run").status_code == 401
    assert client.get(path).status_code == 401, "a second time"


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGES = ("/", "/v1/run", "/docs", "/nowhere", "/sign-in?code=old")


@pytest.mark.parametrize("path", PAGES)
def test_a_browser_that_is_not_signed_in_reads_how_to_get_a_link_and_a_program_gets_a_problem(
    client: TestClient, path: str
) -> None:
    shown = client.get(path, headers=BROWSER)
    assert shown.status_code == 401 and shown.headers["content-type"].startswith("text/html")
    for command in (
        "digenrl view RUN",
        "docker compose run --rm keys link",
        "digenrl keys link FOLDER --scheduler http://localhost",
    ):
        assert f"<code>{command}</code>" in shown.text
    assert "a used or expired link opens this page instead" in shown.text
    assert "frame-ancestors 'none'" in shown.headers["content-security-policy"]
    told = client.get(path)
    assert told.status_code == 401 and told.headers["content-type"] == "application/problem+json"


def test_only_a_browser_without_proof_gets_the_page_of_sign_in(
    client: TestClient, tokens: Tokens
) -> None:
    viewer = BROWSER | tokens.headers("viewer")
    for answer in (
        client.post("/v1/run/pause", headers=BROWSER),
        client.post("/v1/run/pause", headers=viewer),
        client.get("/v1/run", headers=BROWSER | {"host": "<b>"}),
    ):
        assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/v1/run", headers=viewer).json() == "viewer"


def test_codes_and_sessions_end_and_a_link_gives_no_more_than_its_makers_role(
    client: TestClient, tokens: Tokens, access: Access
) -> None:
    now = 0.0
    access.clock = lambda: now
    late = link(client, tokens)
    now += limits.SIGN_IN_CODE_S
    assert client.get(late).status_code == 401
    assert client.get(link(client, tokens, "viewer")).status_code == 303
    assert client.get("/v1/run").json() == "viewer"
    assert client.post("/v1/run/stop").status_code == 403
    now += limits.SESSION_S
    assert client.get("/v1/run").status_code == 401


def test_no_more_codes_are_kept_than_a_limit(access: Access) -> None:
    caller = Caller("x", "viewer")
    codes = [access.new_code(caller) for _ in range(limits.MAX_SESSIONS + 1)]
    with pytest.raises(Refusal):
        access.exchange(codes[0])
    assert access.exchange(codes[1])


def test_a_viewer_signs_no_operator_out_however_often_it_signs_in(access: Access) -> None:
    operator, viewer = Caller("ann", "operator"), Caller("bob", "viewer")
    session, unused = access.exchange(access.new_code(operator)), access.new_code(operator)
    for _ in range(300):
        access.exchange(access.new_code(viewer))
        access.new_code(viewer)
    cookie = Headers({"cookie": f"{access.cookie}={session}"})
    assert access.check("POST", "/v1/run/pause", cookie) == operator
    assert access.exchange(unused)


def test_the_cookie_travels_encrypted_where_there_is_tls(
    app: FastAPI, access: Access, tokens: Tokens, client: TestClient
) -> None:
    access.is_encrypted = True
    assert "Secure" in client.get(link(client, tokens)).headers["set-cookie"]


# --- the log, and the network ---------------------------------------------------------------------


def test_what_changes_something_is_logged_with_its_caller_and_never_with_a_secret(
    client: TestClient, tokens: Tokens
) -> None:
    with capture_logs() as logs:
        client.get("/v1/run", headers=tokens.headers("viewer"))
        client.post("/v1/run/pause", headers=tokens.headers("viewer"))
        client.post("/v1/run/pause", headers=tokens.headers("operator"))
        client.post("/v1/run/stop")
        client.get(link(client, tokens))
    audits = [each for each in logs if each["event"] == "audit"]
    assert [(each["caller"], each["operation"], each["status"]) for each in audits] == [
        (None, "POST /v1/run/pause", 403),
        ("operator", "POST /v1/run/pause", 200),
        (None, "POST /v1/run/stop", 401),
        ("operator", "POST /v1/codes", 201),
    ]
    for role in ROLES:
        assert tokens.token(role) not in str(logs)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_nobody_listens_to_other_machines_without_tls_unless_told_to(host: str) -> None:
    with pytest.raises(UserError, match="--plain-http if the network is private"):
        HttpSettings().listen(host, 0)
    listener = HttpSettings(plain_http=True).listen(host, 0)
    listener.socket.close()
    listen("127.0.0.1", 0).socket.close()


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set both"):
        HttpSettings(tls_cert=tmp_path / "cert.pem").listen("127.0.0.1", 0)
    with pytest.raises(UserError, match="cannot be read"):
        HttpSettings(tls_cert=tmp_path / "a", tls_key=tmp_path / "b").listen("127.0.0.1", 0)


def test_a_service_without_tokens_answers_its_probes_alone() -> None:
    app = worker_app("reward", Health())
    client = TestClient(Guard(app, own_names("")), base_url="http://localhost")
    assert [client.get(path).status_code for path in ("/livez", "/readyz", "/metrics")] == [
        200, 503, 401,
    ]  # fmt: skip


def test_docs_and_probes_are_in_the_table_under_the_names_that_they_have() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)
    app.include_router(probes(Health()))
    add_docs(app)
    check_routes(app)
