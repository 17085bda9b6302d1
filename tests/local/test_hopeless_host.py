"""`digenrl host` where it can never take part: exit status 2, and one line that names the fault.

With this status systemd does not start it again. tests/deploy/test_lab.py has units in such states.
"""

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from digenrl.commands import cli
from digenrl.local.brokers.embedded import Brokers
from digenrl.local.secrets.keys import Keys, keys_in
from shared.recipe.recipe import load_recipe, override
from shared.run.layout import recipe_key
from shared.run.record_backups import write_kept
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.paths import DEMO
from tests.stored_recipe import store_recipe
from tests.storm.disks import small_disks

RUN = "hopeless"


def last_line(keys: Path, *arguments: str) -> str:
    """The only line of `digenrl host` that is no log, with which it ends with status 2."""
    words, said = ["digenrl", "host", "--keys", str(keys), *arguments], io.StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    assert ended.value.code == 2, said.getvalue()
    [line] = [each for each in said.getvalue().splitlines() if each.startswith("digenrl: ")]
    return line


@pytest.mark.parametrize(
    ("settings", "arguments", "line"),
    [
        (None, (), "hosts.env: No such file or directory"),
        ("export OTHER=1\n", (), "hosts.env does not name the run"),
        ("export DIGENRL_RUN=r\n", (), "has no folder of a role"),
        ("export DIGENRL_RUN='r", (), "hosts.env: No closing quotation; "),
        ("export DIGENRL_RUN=r\n", ("--logs", "/dev/null/logs"), "--logs: /dev/null/logs: Not a"),
        ("export DIGENRL_RUN=r\n", ("--run", "other"), "nor --run"),
        (None, ("--at", "224.0.0.1", "--recipe", str(DEMO)), "224.0.0.1 is no IPv4 address of a"),
        ("export DIGENRL_RUN=r\n", ("--roles", "rollout"), "rollout is no folder"),
        ("export DIGENRL_RUN=r\n", ("--roles", "judge"), "judge is unknown"),
        ("export DIGENRL_RUN=r\n", ("--gpus", "3-1"), "--gpus: '3-1' is neither"),
        ("export DIGENRL_RUN=r\n", ("--at", "10.0.0.1"), "needs both"),
        (None, ("--at", "192.0.2.1", "--recipe", str(DEMO)), "--at: 192.0.2.1 is no address of"),
        (None, ("--at", "here", "--recipe", str(DEMO)), "--at: 'here' is no address"),
    ],
)
def test_a_wrong_command_line_or_folder_of_keys_is_final(
    settings: str | None, arguments: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    (keys := tmp_path / "keys").mkdir()
    if settings is not None:
        (keys / "hosts.env").write_text(settings)
    assert line in last_line(keys, *arguments)


@pytest.mark.parametrize(("name", "value"), [("RUN", "a b"), ("SITE", "near,by")])
def test_a_wrong_setting_of_hosts_is_final(name: str, value: str, tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "keys")
    keys.write_settings({"DIGENRL_RUN": "r", f"DIGENRL_{name}": value})
    assert f"DIGENRL_{name}: String should match" in last_line(keys.folder)


@pytest.fixture
async def member(
    tmp_path: Path, brokers: Brokers, nats_url: str, folder_store: ObjectStore
) -> Keys:
    """Keys of a host of a run whose recipe is stored."""
    keys = keys_in(tmp_path / "keys")
    keys.write(brokers.secrets)
    keys.write_settings({"DIGENRL_RUN": RUN, "DIGENRL_STORE_URL": f"file://{tmp_path}/objects"})
    await store_recipe(folder_store, override(load_recipe(DEMO), {"run.name": RUN}))
    return keys


def readable_by_others(keys: Keys) -> None:
    (keys.folder / "rollout" / "secret").chmod(0o644)


def another_password(keys: Keys) -> None:
    url = keys.folder / "rollout" / "digenrl_nats_url"
    url.write_text(url.read_text().replace("@", "-of-another-run@"))


def stored(keys: Keys, old: str, new: str) -> None:
    objects = keys.folder.parent / "objects"
    text = (objects / recipe_key(RUN)).read_text()
    assert old in text
    changed = text.replace(old, new, 1).encode()
    asyncio.run(write_kept(ObjectStore(FolderBackend(objects)), RUN, "recipe", changed))


def another_release(keys: Keys) -> None:
    stored(keys, '"release": "', '"release": "0.0.')


def a_recipe_for_gpus(keys: Keys) -> None:
    stored(keys, '"device": "cpu"', '"device": null')
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def no_change(keys: Keys) -> None:
    pass


@pytest.mark.parametrize(
    ("plant", "roles", "line"),
    [
        (readable_by_others, "rollout", "others may read"),
        (another_password, "rollout", "refuses this user or password"),
        (another_release, "rollout", "the run is of release 0.0."),
        (a_recipe_for_gpus, "rollout", "--gpus: this host has no GPU"),
        (no_change, "encoder", "--roles: the recipe has no work for encoder"),
    ],
)
def test_what_the_run_refuses_is_final(
    plant: Callable[[Keys], None], roles: str, line: str, member: Keys
) -> None:
    with mock.patch.dict(os.environ):
        plant(member)
        assert line in last_line(member.folder, "--roles", roles)


def test_a_full_disk_is_final(
    member: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with small_disks(tmp_path, {"cache": "10m"}):
            monkeypatch.setenv("DIGENRL_HOST_CACHE", str(tmp_path / "cache"))
            assert "DIGENRL_HOST_CACHE: " in last_line(member.folder, "--roles", "rollout")
    except PermissionError as error:
        pytest.skip(str(error))
