"""Brokers in folders as people name them, and brokers that reject their configuration."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import redis

from digenrl.local.brokers import seaweedfs
from digenrl.local.brokers.embedded import plan_brokers
from digenrl.local.brokers.nats_config import server_config
from digenrl.local.checking import doctor
from digenrl.local.processes.program import Program
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.runs import Run
from digenrl.local.secrets.keys import load_keys
from digenrl.local.store import run_store
from shared.errors import Unavailable, UserError
from shared.process.settings import ServiceSettings
from shared.store import StoreSettings, open_store
from tests.brokers import PASSWORD
from tests.waiting import until

EVERYTHING = 'ü my (1) runs, it\'s 模型 🎩 "q" $HOME `x` #1 100%41 a=b;c&d [x] *? \\n'
FOLDERS = ["my runs", "müller", "模型", "it's", 'a"b', "(1), 2", "50%20#1?", "$HOME", "a\\nb", "🎩"]
LONG = Path("a" * 100) / ("b" * 100) / "it's ü"


def slow(folder: str) -> object:
    return pytest.param(folder, marks=pytest.mark.slow)


@pytest.mark.broker
@pytest.mark.parametrize("folder", [EVERYTHING, str(LONG), *map(slow, FOLDERS)])
async def test_brokers_of_roles_with_tls_inside_start_and_keep_data_in_any_folder(
    tmp_path: Path, folder: str
) -> None:
    data = tmp_path / folder
    logs = data / "logs"
    logs.mkdir(parents=True)
    brokers = plan_brokers(data, load_keys(data))
    supervisor = Supervisor(logs, {})
    try:
        await asyncio.gather(*(supervisor.start(program) for program in brokers.programs))
        url = redis.from_url(brokers.secrets["scheduler"]["DIGENRL_REDIS_URL"])
        assert url.ping()
        said = (data / "seaweedfs/.seaweedfs/security.toml").read_text()
        assert "Skipping" not in (logs / "objects.log").read_text(), "the ports would be open"
        assert ("[grpc]" in said) and any((data / "objects").glob("filer.db"))
        assert (data / "nats/jetstream").is_dir() and any((data / "valkey").iterdir())
        assert not any(child.num_restarts for child in supervisor.children.values())
    finally:
        await supervisor.stop(list(supervisor.children), seconds=0.5)


def sockets() -> set[Path]:
    return set(Path("/tmp").glob("seaweedfs-*"))


@pytest.mark.broker
@pytest.mark.parametrize("seconds", [0.0, 10.0])
async def test_an_object_store_leaves_nothing_outside_its_folder_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    (logs := tmp_path / "logs").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = sockets()
    plan = plan_brokers(tmp_path / LONG, PASSWORD)
    [store] = [program for program in plan.programs if program.name == "objects"]
    supervisor = Supervisor(logs, {})
    await supervisor.start(store)
    home = tmp_path / LONG / "seaweedfs"
    assert {"filer.sock", "s3.sock"} <= {path.name for path in home.iterdir()}
    ports = [
        argument.partition("=")[2]
        for argument in store.argv
        if ".port=" in argument and "=0" not in argument
    ]
    ours = [f"-{int(port) + 10_000}.sock" for port in ports] + [f"-{port}.sock" for port in ports]
    assert len(ports) == 5
    await supervisor.stop(["objects"], seconds=seconds)
    assert not [path for path in sockets() - before if path.name.endswith(tuple(ours))]
    assert not list(temporary.iterdir())
    assert any("weed" in path.name for path in home.iterdir()), "the logs are in the run's folder"


@pytest.mark.broker
@pytest.mark.slow
async def test_the_space_of_what_is_deleted_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweedfs, "VACUUM_PAUSE_S", 1.0)
    brokers = plan_brokers(tmp_path, load_keys(tmp_path))
    for name, value in (brokers.environment | brokers.owner).items():
        monkeypatch.setenv(name, value)
    [program] = [program for program in brokers.programs if program.name == "objects"]
    supervisor = Supervisor(tmp_path, {})
    await supervisor.start(program)
    try:
        store = open_store(ServiceSettings(run="run").store)
        kept = await store.put("run/weights", os.urandom(1 << 20), suffix=".bin")
        await store.write("run/old", os.urandom(20 << 20))
        assert (store.bytes_on_disk() or 0) > 21 << 20
        await store.delete(["run/old"])
        await until(lambda: (store.bytes_on_disk() or 0) <= 7 << 20, seconds=60)
        assert len(await store.get(kept)) == 1 << 20
    finally:
        await supervisor.stop(["objects"], seconds=0.5)


def broken(tmp_path: Path, name: str) -> Program:
    """A broker whose configuration cannot be read, with where it stands."""
    plan = plan_brokers(tmp_path / "run", PASSWORD)
    [found] = [program for program in plan.programs if program.name == name]
    assert found.config is not None
    lines = {"valkey": "port 1\ndir a b\n", "nats": 'port: 1\nstore: "\\u00fc"\n', "objects": "{"}
    found.config.write_text(lines[name])
    return found


@pytest.mark.broker
@pytest.mark.parametrize("name", ["valkey", "nats", "objects"])
async def test_a_broker_that_rejects_its_configuration_ends_the_start_at_once(
    tmp_path: Path, name: str
) -> None:
    program = broken(tmp_path, name)
    supervisor = Supervisor(tmp_path, {})
    with pytest.raises(UserError, match="rejects its configuration") as caught:
        await supervisor.start(program)
    assert supervisor.children[name].num_restarts == 0
    line = "" if name == "objects" else ", line 2"
    assert f"{program.config}{line}: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.broker
async def test_a_broker_that_dies_otherwise_is_started_again(tmp_path: Path) -> None:
    plan = plan_brokers(tmp_path / "run", PASSWORD)
    [valkey] = [program for program in plan.programs if program.name == "valkey"]
    supervisor = Supervisor(tmp_path, {})
    await supervisor.start(valkey)
    try:
        process = supervisor.children["valkey"].process
        assert process is not None
        process.send_signal(9)
        await until(lambda: supervisor.children["valkey"].num_restarts)
    finally:
        await supervisor.stop(["valkey"])


@pytest.mark.broker
def test_a_command_does_not_wait_for_the_store_of_a_run_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "recipe.json").write_text("{}")
    monkeypatch.setattr("digenrl.local.brokers.seaweedfs.INDEX_AND_START", "echo no space; exit 1")
    began = time.monotonic()
    ended = pytest.raises(Unavailable, match="objects ended with status 1: no space")
    with ended, run_store(Run("run", "run", tmp_path, is_local=True)):
        pass
    assert time.monotonic() - began < 30


@pytest.mark.broker
def test_the_doctor_starts_brokers_in_the_folder_of_runs(tmp_path: Path) -> None:
    runs = tmp_path / EVERYTHING
    runs.mkdir()
    found = doctor.path_finding(runs / "not there yet")
    assert found.state == "ok" and str(runs) in found.found
    assert not list(runs.iterdir())


def test_the_doctor_reports_a_folder_in_which_brokers_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_an_earlier_release(store: Path, **more: object) -> str:
        return server_config("x", **more).replace('"x"', '"\\u00fc"')  # type: ignore[arg-type]

    monkeypatch.setattr("digenrl.local.brokers.embedded.server_config", of_an_earlier_release)
    found = doctor.path_finding(tmp_path)
    assert found.state == "fault" and "nats.conf, line" in found.found and found.remedy


@pytest.mark.parametrize("folder", [EVERYTHING, *FOLDERS])
async def test_a_folder_of_any_name_is_a_store(tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    store = open_store(StoreSettings(url=place.as_uri()))
    await store.write("run/object", b"1")
    assert (place / "run/object").read_bytes() == b"1" and store.bytes_on_disk()
    if "%" not in folder:
        assert await open_store(StoreSettings(url=f"file://{place}")).read("run/object") == b"1"
