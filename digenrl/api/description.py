"""Describes the whole HTTP API as OpenAPI 3.1, for `docs/openapi.json`.

python -m digenrl.api.description > docs/openapi.json     renews it; a test compares it
"""

import json
import sys
from types import SimpleNamespace
from typing import Any, cast

from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from shared.process.service import Health


def described() -> dict[str, Any]:
    """Return the description of the API."""
    nobody = cast(Scheduler, SimpleNamespace(health=Health()))  # no route is asked
    return create_app(nobody).openapi()


def text() -> str:
    """Return the description as it is committed."""
    return json.dumps(described(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
