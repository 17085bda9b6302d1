"""`digenrl doctor` finds what was planted, names it and says how to mend it."""

import json
import os
import re
import shutil
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local import limits
from digenrl.local.checking import doctor
from shared.errors import UserError
from tests.http_server import QuietHandler, serving
from tests.paths import DIGITS

CLOSED = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DIGENRL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(limits, "SERVICE_TIMEOUT_S", 1.0)


def examined(*arguments: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code, and what was found wrong, by check."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments], catch_exceptions=False)
    wrong: dict[str, list[dict[str, str]]] = {}
    for each in json.loads(result.stdout):
        if each["state"] != "ok":
            wrong.setdefault(each["check"], []).append(each)
    return result.exit_code, wrong


def test_nothing_is_wrong_here_and_nothing_is_left(tmp_path: Path) -> None:
    code, wrong = examined(str(DIGITS), "--runs", str(tmp_path))
    assert code == 0 and not wrong.keys() - {"gpus", "memory"}, wrong
    assert not list(tmp_path.iterdir())


def full(_: Path) -> Any:
    return SimpleNamespace(free=1 << 20)


def no_brokers() -> dict[str, str | UserError]:
    return {"weed": UserError("weed is not installed: it comes with make install")}


def old_fastapi(name: str) -> str:
    return "0.1.0" if name == "fastapi" else "999.0"


FAULTS = {
    "disk": ("shutil.disk_usage", full, "free some space"),
    "brokers": ("broker_binaries", no_brokers, "digenrl up"),
    "packages": ("version", old_fastapi, "make install"),
    "open files": ("resource.getrlimit", lambda _: (64, 64), "ulimit -n"),
    "memory": ("os.sysconf", lambda _: 1 << 10, "stop other programs"),
}


def test_a_machine_that_lacks_something_is_told_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, broken, _ in FAULTS.values():
        target = doctor if "." not in place else getattr(doctor, place.split(".")[0])
        monkeypatch.setattr(target, place.rpartition(".")[2], broken)
    code, wrong = examined("--runs", str(tmp_path))
    for check, (_, _, remedy) in FAULTS.items():
        assert remedy in wrong[check][0]["remedy"]
    assert code == 1


def settings_that_are_wrong(folder: Path) -> dict[str, dict[str, str]]:
    """Return, for each check, variables that plant a fault which it should find."""
    readable = folder / "secrets"
    readable.mkdir()
    (readable / "digenrl_hang_s").write_text("5")
    (readable / "digenrl_hang_s").chmod(0o644)
    return {
        "environment": {"DIGENRL_STORE_ULR": "file:///tmp"},
        "secrets": {"DIGENRL_SECRETS_DIR": str(readable)},
        "nats": {"DIGENRL_NATS_URL": f"nats://{CLOSED}"},
        "redis": {"DIGENRL_REDIS_URL": f"redis://{CLOSED}"},
        "store": {"DIGENRL_STORE_URL": "s3://runs", "DIGENRL_S3_ENDPOINT": f"http://{CLOSED}",
                  "DIGENRL_S3_ACCESS_KEY": "a", "DIGENRL_S3_SECRET_KEY": "b"},
        "api": {"DIGENRL_API_TOKENS": str(folder / "nowhere.json")},
    }  # fmt: skip


SAID = {
    "environment": "is DIGENRL_STORE_URL meant?",
    "secrets": "chmod 600",
    "nats": "NATS_URL",
    "redis": "REDIS_URL",
    "store": "S3_ENDPOINT",
    "api": "digenrl keys init",
}


@pytest.mark.parametrize("checks", [SAID.keys() - {"secrets"}, {"secrets"}], ids=["all", "secrets"])
def test_settings_that_are_wrong_are_named(
    checks: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check, variables in settings_that_are_wrong(tmp_path).items():
        for name, value in variables.items() if check in checks else ():
            monkeypatch.setenv(name, value)
    code, wrong = examined("--runs", str(tmp_path))
    assert code == 1
    for check in checks:
        assert SAID[check] in wrong[check][0]["found"] + wrong[check][0]["remedy"]
    assert not wrong.keys() - {*checks, "gpus", "memory"}


def test_a_secrets_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_SECRETS_DIR", str(tmp_path / "nowhere"))
    assert "is no folder" in examined("--runs", str(tmp_path))[1]["secrets"][0]["found"]


def test_a_store_whose_clock_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(QuietHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            self.send_header("date", formatdate(time.time() - 3600, usegmt=True))
            self.end_headers()

    with serving(Late) as url:
        monkeypatch.setenv("DIGENRL_S3_ENDPOINT", url)
        [clock] = examined("--runs", str(tmp_path))[1]["clock"]
    assert re.search(r"differs by \+36\d\d s", clock["found"]) and "NTP" in clock["found"]


def test_a_recipe_whose_model_is_not_there(tmp_path: Path) -> None:
    shutil.copy(DIGITS, tmp_path / "digits.toml")
    code, wrong = examined(str(tmp_path / "digits.toml"), "--runs", str(tmp_path))
    assert code == 1 and "model.folder" in wrong["recipe"][0]["found"]


def test_a_folder_that_is_a_store_is_tried_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path}/objects")
    code, wrong = examined("--runs", str(tmp_path))
    assert code == 0 and "store" not in wrong
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
