"""Describes the whole HTTP API as OpenAPI 3.1, for `docs/openapi.json`.

python -m digenrl.api.description > docs/openapi.json     renews it; a test compares it
"""

import json
import sys
from types import SimpleNamespace
from typing import Any, cast

import httpx
from fastapi import FastAPI

from digenrl.api.export_routes import Exports
from digenrl.api.front import api_routes
from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.api.sample_now import SampleNow
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from shared.process.http_api import add_problems
from shared.process.service import Health
from shared.store import ObjectStore

TITLE = "DigenRL"
PAGE_ONLY = "Served by the process of the run's page alone (`digenrl view`), from what is stored."


def described() -> dict[str, Any]:
    """Return the description of the API: the scheduler's routes, and the routes that read the
    store."""
    nobody = cast(Scheduler, SimpleNamespace(health=Health()))  # no route is asked
    whole, page = create_app(nobody).openapi(), FastAPI(title=TITLE)
    add_problems(page)
    live, nowhere = LiveRun("", httpx.AsyncClient(trust_env=False)), cast(ObjectStore, None)
    history = RunHistory(nowhere, "run")
    page.include_router(
        api_routes(history, live, exports=Exports(history, {}), sampling=SampleNow(history, {}))
    )
    for path, operations in page.openapi()["paths"].items():
        for operation in operations.values():
            operation["description"] = f"{operation['description']}\n\n{PAGE_ONLY}"
        whole["paths"].setdefault(path, {}).update(operations)
    whole["components"]["schemas"] |= page.openapi()["components"]["schemas"]
    whole["info"]["title"] = TITLE
    whole["servers"] = [
        {"url": "/", "description": "the run's page, or for what is live the scheduler"}
    ]
    return whole


def text() -> str:
    """Return the description as it is committed."""
    return json.dumps(described(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
