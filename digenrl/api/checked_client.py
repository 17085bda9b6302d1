"""The client of our own commands: it checks that responses come from this release."""

from collections.abc import Callable
from typing import Self, TypeVar, get_type_hints

import httpx
from pydantic import TypeAdapter, ValidationError

from digenrl.api import client, export_routes, models, run_logs, run_routes
from digenrl.reading import facts, reading
from services.scheduler.shell import api_batches, api_letters, api_load, api_models
from shared.errors import UserError
from shared.messages import contracts
from shared.process import http_access, service
from shared.process.settings import ClientSettings
from shared.run import usage

T = TypeVar("T")
MODULES = {
    "export_routes": export_routes, "models": models, "run_logs": run_logs,
    "run_routes": run_routes, "usage": usage,
    "api_batches": api_batches,
    "api_letters": api_letters, "api_load": api_load, "api_models": api_models,
    "contracts": contracts, "http_access": http_access, "service": service,
    "facts": facts, "reading": reading,
}  # fmt: skip
"""Modules of the types that the client's annotations name."""


class CheckedNoAnswer(client.NoAnswer, UserError):
    """The user can name another address, or start the run."""


class CheckedRefusal(client.Refused, UserError):
    """The user can change the request."""


class CheckedClient(client.Client):
    no_answer, refused = CheckedNoAnswer, CheckedRefusal

    @classmethod
    def at(cls, url: str, *, token: str = "", timeout: float = client.TIMEOUT_S) -> Self:
        """Return a client of an address by the settings of our processes."""
        settings = ClientSettings()
        headers = {"authorization": f"Bearer {token}"} if token else settings.headers
        return cls.of(url, headers, settings.trusted, timeout)

    def _read(self, operation: Callable[..., T], answer: httpx.Response) -> T:
        kind: type[T] = get_type_hints(operation, localns=MODULES)["return"]
        try:
            return TypeAdapter(kind).validate_json(answer.content)
        except ValidationError as error:
            raise self._other(answer, error.errors(include_url=False)[0]["msg"]) from error
