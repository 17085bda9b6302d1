"""The site of a worker: a setting, which its status carries."""

import pytest

from digenrl.commands.options import settings_from_options
from shared.errors import UserError
from shared.messages.codec import decode, encode
from shared.messages.records import HOME
from shared.messages.workers import WorkerStatus
from shared.process.worker import Worker


def test_a_worker_belongs_to_the_site_that_its_variable_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DIGENRL_RUN", "test")
    assert settings_from_options().site == HOME
    monkeypatch.setenv("DIGENRL_SITE", "lab-2")
    assert settings_from_options().site == "lab-2"


@pytest.mark.parametrize("name", ["", "two words", "a.b", "-a", "x" * 65])
def test_a_site_that_is_no_name_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("DIGENRL_RUN", "test")
    monkeypatch.setenv("DIGENRL_SITE", name)
    with pytest.raises(UserError, match=r"DIGENRL_SITE: .* is not a name; use 1 to 64 letters"):
        settings_from_options()


@pytest.mark.parametrize("site", [HOME, "lab-2"])
def test_the_status_of_a_worker_names_its_site(site: str) -> None:
    status = decode(encode(Worker("rollout", "r", "waiting_for_trainer", site=site)._status()))
    assert isinstance(status, WorkerStatus) and status.site == site
