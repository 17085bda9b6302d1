from functools import cache

import pytest

from digenrl.planning.plan import plan


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the commands of a test that ask for one plan share it."""
    monkeypatch.setattr("digenrl.planning.plan.plan", cache(plan))
