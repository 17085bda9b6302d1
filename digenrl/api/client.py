"""A typed client of a run's HTTP API: one method per operation, named as the API names it.

    with Client.open("digits") as run:
        print(run.get_run().phase, [worker.worker for worker in run.list_workers()])
        run.drain_worker("rollout-3")

`Client.at` takes an address: the run's page for everything, or the scheduler for the present
(docs/openapi.json lists the operations of each). Each request that changes something has a key of
its own: a request whose response was lost is repeated, and is carried out once.
"""

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar
from urllib.parse import quote

import httpx

if TYPE_CHECKING:
    from digenrl.api import export_routes, models, run_logs, run_routes, sample_now
    from digenrl.reading import facts, reading
    from services.scheduler.shell import api_batches, api_letters, api_load, api_models
    from shared.messages import contracts
    from shared.process import http_access, service
    from shared.run import usage

TIMEOUT_S = 30.0
EXPORT_S, SAMPLE_S, PLAN_S = 600.0, 3600.0, 400.0
"""Longest times in which adapter files are made, a prompt is sampled, and a plan is made."""
MAX_TRIES = 3
RETRY_DELAY_S = 1.0
"""Seconds before the next try, and before events are requested again."""
Order = Literal["number", "worst", "best", "unscored"]
Params = dict[str, str | int | None]
T = TypeVar("T")


class NoAnswer(Exception):
    """Nothing answers at the address, or what answers is not our API."""


class Refused(Exception):
    """The service has answered with a problem."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Event(NamedTuple):
    """Something that happened."""

    id: str
    """Position from which `get_events(after=...)` continues; empty if the event is not repeated."""
    name: str
    fields: dict[str, Any]


class Record(dict[str, Any]):
    """An object of a response, whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Client:
    """Requests one service of a run; raises NoAnswer if it is silent, and Refused if it refuses."""

    no_answer: ClassVar[type[NoAnswer]] = NoAnswer
    refused: ClassVar[type[Refused]] = Refused

    def __init__(self, http: httpx.Client) -> None:
        """``http`` has the address and the caller's token."""
        self.http = http
        self._close: Callable[[], object] = lambda: None

    @classmethod
    def at(cls, url: str, *, token: str = "", timeout: float = TIMEOUT_S) -> Self:
        """Return a client of an address. Without a token it sends DIGENRL_API_TOKEN; servers are
        verified by the machine's certificates and the certificates in DIGENRL_CA (PEM)."""
        token = token or os.environ.get("DIGENRL_API_TOKEN", "")
        trusted = ssl.create_default_context()
        if ca := os.environ.get("DIGENRL_CA"):
            trusted.load_verify_locations(cadata=ca)
        return cls.of(url, {"authorization": f"Bearer {token}"} if token else {}, trusted, timeout)

    @classmethod
    def of(
        cls, url: str, headers: dict[str, str], trusted: ssl.SSLContext, timeout: float = TIMEOUT_S
    ) -> Self:
        """Return a client of an address that sends these headers."""
        return cls(httpx.Client(
            base_url=url.rstrip("/"), headers=headers, timeout=timeout, trust_env=False,
            verify=trusted if url.startswith("https:") else False,
        ))  # fmt: skip

    @classmethod
    def open(cls, run: str | Path, runs: str | Path | None = None) -> Self:
        """Return an operator's client of a run of `digenrl up`: of its page while the run is in
        progress, else of a page that a process of its own serves until the client is closed.

        Args:
            run: the run's name or folder.
            runs: folder of runs, by default DIGENRL_RUNS or `runs`.

        Raises:
            NoAnswer: if there is no such run; it has the reason.
        """
        named = Path(runs or os.environ.get("DIGENRL_RUNS") or "runs") / run
        folder = named if named.is_dir() else Path(run)
        try:
            token = (folder / "keys" / "operator.token").read_text().strip()
            client = cls.at((folder / "page.url").read_text().strip(), token=token)
            if client.http.get("/v1/run").is_success:
                return client
        except (OSError, httpx.HTTPError):
            pass
        return cls._served(folder)

    @classmethod
    def _served(cls, folder: Path) -> Self:
        """Return a client of a page that a new process serves."""
        argv = [sys.executable, "-P", "-m", "digenrl", "view", str(folder), "--open-api"]
        process = subprocess.Popen(argv, stdout=-1, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url.startswith("http"):
            output = f"{url} {process.communicate()[0]}".strip()
            raise cls.no_answer(output.removeprefix("digenrl: "))
        client = cls.at(url)
        client._close = partial(_end, process)
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()
        self._close()

    def get_livez(self) -> "service.ProbeView":
        return self._get(Client.get_livez, "/livez", ok=(503,))

    def get_readyz(self) -> "service.ProbeView":
        return self._get(Client.get_readyz, "/readyz", ok=(503,))

    def get_metrics(self) -> str:
        return self._ask("GET", "/metrics").text

    def make_code(self) -> "http_access.CodeView":
        return self._post(Client.make_code, "/v1/codes")

    def get_run(self) -> "api_models.RunView":
        return self._get(Client.get_run, "/v1/run")

    def get_status(self) -> "reading.RunReading":
        return self._get(Client.get_status, "/v1/status")

    def get_load(self) -> "api_load.LoadView":
        return self._get(Client.get_load, "/v1/load")

    def pause_run(self) -> "api_models.Accepted":
        return self._post(Client.pause_run, "/v1/run/pause")

    def pause_at_failure_run(self) -> "api_models.Accepted":
        return self._post(Client.pause_at_failure_run, "/v1/run/pause-at-failure")

    def resume_run(self) -> "api_models.Accepted":
        return self._post(Client.resume_run, "/v1/run/resume")

    def stop_run(self) -> "api_models.Accepted":
        return self._post(Client.stop_run, "/v1/run/stop")

    def get_tag(self) -> "api_models.TagView":
        return self._get(Client.get_tag, "/v1/tag")

    def set_tag(
        self, mode: "contracts.TagMode", groups: int | None = None
    ) -> "api_models.Accepted":
        return self._post(Client.set_tag, "/v1/tag", json={"mode": mode, "groups": groups})

    def list_workers(self) -> "list[api_models.WorkerView]":
        return self._get(Client.list_workers, "/v1/workers")

    def drain_worker(self, worker: str) -> "api_models.Accepted":
        return self._post(Client.drain_worker, f"/v1/workers/{quote(worker, safe='')}/drain")

    def undrain_worker(self, worker: str) -> "api_models.Accepted":
        return self._post(Client.undrain_worker, f"/v1/workers/{quote(worker, safe='')}/undrain")

    def list_batches(
        self, limit: int = 50, before: int | None = None
    ) -> "list[api_batches.BatchView]":
        return self._get(Client.list_batches, "/v1/batches", {"limit": limit, "before": before})

    def get_batch(self, batch: int) -> "api_batches.BatchDetail":
        return self._get(Client.get_batch, f"/v1/batches/{batch}")

    def get_usage(self, batch: int) -> "usage.BatchUsage":
        return self._get(Client.get_usage, f"/v1/batches/{batch}/usage")

    def get_timeline(self, batch: int) -> "usage.Timeline":
        return self._get(Client.get_timeline, f"/v1/batches/{batch}/timeline")

    def list_versions(
        self, limit: int = 50, before: int | None = None
    ) -> "list[api_batches.VersionView]":
        return self._get(Client.list_versions, "/v1/versions", {"limit": limit, "before": before})

    def export_version(
        self, version: int | Literal["best", "newest"],
        layout: "export_routes.AdapterLayout" = "diffusers",
    ) -> bytes:  # fmt: skip
        """Return a ZIP file with the adapter's files; it takes seconds to be made."""
        path, wanted = f"/v1/versions/{version}/adapter", {"layout": layout}
        return self._ask("GET", path, params=wanted, timeout=EXPORT_S).content

    def sample_prompt(
        self, prompt: str, versions: list[int], seed: int = 0, num_each: int = 1
    ) -> "list[sample_now.PromptSample]":
        body = {"prompt": prompt, "versions": versions, "seed": seed, "num_each": num_each}
        return self._post(Client.sample_prompt, "/v1/samples", json=body, timeout=SAMPLE_S)

    def list_groups(self, batch: int, limit: int = 50, after: str = "") -> "models.GroupPage":
        return self._get(
            Client.list_groups, f"/v1/batches/{batch}/groups", {"limit": limit, "after": after}
        )

    def list_samples(
        self, batch: int, order: Order = "number", limit: int = 50, after: str = ""
    ) -> "models.SamplePage":
        wanted: Params = {"order": order, "limit": limit, "after": after}
        return self._get(Client.list_samples, f"/v1/batches/{batch}/samples", wanted)

    def get_sample(self, batch: int, group: int, sample: int) -> "models.SampleHistory":
        return self._get(Client.get_sample, f"/v1/batches/{batch}/samples/{group}/{sample}")

    def get_sample_media(self, batch: int, group: int, sample: int) -> bytes:
        path = f"/v1/batches/{batch}/samples/{group}/{sample}/media"
        return self._ask("GET", path).content

    def get_recipe(self) -> "run_routes.RecipeView":
        return self._get(Client.get_recipe, "/v1/recipe")

    def get_curves(self, after: int = 0, limit: int = 500) -> "run_routes.CurvesView":
        return self._get(Client.get_curves, "/v1/curves", {"after": after, "limit": limit})

    def list_evaluations(
        self, limit: int = 50, before: int | None = None
    ) -> "list[facts.EvaluationView]":
        wanted: Params = {"limit": limit, "before": before}
        return self._get(Client.list_evaluations, "/v1/evaluations", wanted)

    def get_evaluation(self, version: int) -> "run_routes.EvaluationDetail":
        return self._get(Client.get_evaluation, f"/v1/evaluations/{version}")

    def get_media(self, name: str, small: bool = False) -> bytes:
        path = f"/v1/media/{quote(name, safe='')}"
        return self._ask("GET", path, params={"small": small}).content

    def list_dead_letters(
        self, state: "api_letters.Wanted" = "open", limit: int = 50, before: int | None = None
    ) -> "list[api_letters.DeadLetterView]":
        query: Params = {"state": state, "limit": limit, "before": before}
        return self._get(Client.list_dead_letters, "/v1/dead-letters", query)

    def get_dead_letter(self, number: int) -> "api_letters.DeadLetterDetail":
        return self._get(Client.get_dead_letter, f"/v1/dead-letters/{number}")

    def retry_dead_letter(self, number: int) -> "api_letters.SettledView":
        return self._post(Client.retry_dead_letter, f"/v1/dead-letters/{number}/retry")

    def drop_dead_letter(self, number: int) -> "api_letters.SettledView":
        return self._post(Client.drop_dead_letter, f"/v1/dead-letters/{number}/drop")

    def list_logs(self, word: str = "", process: str = "", level: str = "") -> "run_logs.LogView":
        wanted: Params = {"word": word, "process": process, "level": level}
        return self._get(Client.list_logs, "/v1/logs", wanted)

    def list_audit(self, limit: int = 50, after: str = "") -> "models.AuditPage":
        return self._get(Client.list_audit, "/v1/audit", {"limit": limit, "after": after})

    def get_storage(self) -> "models.StorageView":
        return self._get(Client.get_storage, "/v1/storage")

    def get_plan(
        self,
        hosts: str = "",
        devices: str = "",
        profile: str = "",
        staleness: int | None = None,
        host_gpus: int | None = None,
    ) -> "models.PlanView":
        wanted: Params = {
            "hosts": hosts, "devices": devices, "profile": profile, "staleness": staleness,
            "host_gpus": host_gpus,
        }  # fmt: skip
        patience = {"timeout": httpx.Timeout(PLAN_S).as_dict()}
        return self._get(Client.get_plan, "/v1/plan", wanted, extensions=patience)

    def get_events(self, after: str = "") -> Iterator[Event]:
        """Yield events without end, after a known one: across restarts of the server, each once.
        ``after``: an event's id, "start", or nothing for from now on.

        Raises:
            Refused: if the service refuses.
        """
        while True:
            try:
                for event in self._events(after):
                    after = event.id or after
                    yield event
            except httpx.HTTPError:
                pass
            time.sleep(RETRY_DELAY_S)

    def _events(self, after: str) -> Iterator[Event]:
        query = {"after": after} if after else {}
        timeout = httpx.Timeout(TIMEOUT_S)  # a comment comes every 15 s
        with self.http.stream("GET", "/v1/events", params=query, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                raise self.refused(answer.status_code, _detail(answer))
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(":")
                    fields[name] = value.removeprefix(" ")
                    continue
                if "event" in fields:
                    data = json.loads(fields["data"])
                    yield Event(fields.get("id", ""), fields["event"], data)
                fields = {}

    def _get(
        self, operation: Callable[..., T], path: str, params: Params | None = None, **more: Any
    ) -> T:
        given = {name: each for name, each in (params or {}).items() if each not in (None, "")}
        return self._read(operation, self._ask("GET", path, params=given, **more))

    def _post(self, operation: Callable[..., T], path: str, **more: Any) -> T:
        return self._read(operation, self._ask("POST", path, **more))

    def _read(self, operation: Callable[..., T], answer: httpx.Response) -> T:
        """Return what an operation, a method of this class, returns of a response."""
        try:
            record: T = json.loads(answer.content, object_hook=Record)
        except ValueError as error:
            raise self._other(answer, error) from error
        return record

    def _other(self, answer: httpx.Response, reason: object) -> NoAnswer:
        at, path = self.http.base_url, answer.request.url.path
        return self.no_answer(f"{at} is no API of this release: {path}: {reason}")

    def _ask(self, method: str, path: str, ok: tuple[int, ...] = (), **more: Any) -> httpx.Response:
        answer = None
        for tries in reversed(range(MAX_TRIES)):
            try:
                answer = self.http.request(method, path, **more)
                break
            except httpx.ConnectError as error:
                raise self._silent(error) from None
            except httpx.HTTPError as error:
                if not tries:
                    raise self._silent(error) from None
                time.sleep(RETRY_DELAY_S)
        assert answer is not None
        if answer.is_success or answer.status_code in ok:
            return answer
        raise self.refused(answer.status_code, _detail(answer))

    def _silent(self, error: httpx.HTTPError) -> NoAnswer:
        return self.no_answer(f"--scheduler: {self.http.base_url} does not answer: {error}")


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    process.communicate()


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the service answers {answer.status_code}"
