"""The compose files and the Dockerfile, read without Docker."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml

from digenrl.local.brokers import seaweedfs
from digenrl.local.brokers.deployment import BrokerAddresses, make_deployment
from tests.paths import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
OURS = ("scheduler", "rollout", "encoder", "reward", "trainer", "evaluation", "view", "report")
DERIVED = {
    "encoder": "rollout", "trainer": "rollout", "evaluation": "report", "view": "report",
    "keys": "scheduler",
}  # fmt: skip
"""Images that are another one with another command."""
BROKERS = ("nats", "redis", "s3")
ROLE = {name: name for name in OURS} | {"evaluation": "client", "report": "client"}
"""Whose secrets a container sees."""

every_service = pytest.mark.parametrize("name", SERVICES)
staying = pytest.mark.parametrize("name", [name for name in SERVICES if name != "keys"])


def stages() -> dict[str, tuple[str, str]]:
    """Returns the base and the instructions of each build stage."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return {parts[i + 1]: (parts[i], parts[i + 2]) for i in range(1, len(parts), 3)}


def installed(target: str) -> list[str]:
    """What is installed in a target, in this order."""
    known = stages()
    parent, text = known[target]
    lines = re.findall(r"bin/install-packages (.*?)(?: && \\)?$", text, flags=re.MULTILINE)
    return (installed(parent) if parent in known else []) + lines


def packages(requirements: list[str], extras: dict[str, list[str]]) -> set[str]:
    """Names of everything that ``requirements`` lead to; `digenrl[a,b]` is looked up in extras."""
    found: set[str] = set()
    pending = list(requirements)
    while pending:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([^]]*)])?", pending.pop())
        assert match is not None
        if match[1] == "digenrl":
            pending += [wanted for extra in match[2].split(",") for wanted in extras[extra.strip()]]
        elif match[1].lower() not in found:
            found.add(match[1].lower())
            pending += required_by(match[1])
    return found


def required_by(package: str) -> list[str]:
    try:
        return [line for line in requires(package) or [] if "extra ==" not in line]
    except PackageNotFoundError:  # for another system or Python
        return []


def test_it_is_one_container_per_process_and_two_rollout_workers() -> None:
    assert set(SERVICES) == {*OURS, *BROKERS, "keys"}
    assert SERVICES["rollout"]["scale"] == "${DIGENRL_ROLLOUT_WORKERS:-2}"
    assert [name for name in SERVICES if "profiles" in SERVICES[name]] == [
        "encoder", "evaluation",
    ]  # fmt: skip


@every_service
def test_a_container_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "65532:65532"
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert service["mem_limit"] == "${DIGENRL_MEMORY_LIMIT:-8g}"


@staying
def test_a_container_is_probed_reaped_restarted_and_stopped_in_order(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["init"] is True
    assert service["restart"] == "unless-stopped"
    assert service["stop_grace_period"] == "30s"


@every_service
def test_what_a_container_keeps_is_in_a_named_volume_that_its_image_owns(name: str) -> None:
    named = [each for each in SERVICES[name]["volumes"] if isinstance(each, str)]
    for volume in named:
        source, target = volume.split(":")
        assert source in COMPOSE["volumes"]
        assert f"chown 65532:65532 {target}\n" in stages()[name][1]
    assert bool(named) == (name in (*BROKERS, "report", "keys"))


@staying
def test_a_container_reads_the_secrets_of_its_own_role_and_no_others(name: str) -> None:
    [keys] = [each for each in SERVICES[name]["volumes"] if not isinstance(each, str)]
    role = ROLE.get(name, f"brokers/{name}")
    assert keys == {
        "type": "volume", "source": "keys", "target": "/run/keys", "read_only": True,
        "volume": {"subpath": role},
    }  # fmt: skip
    assert "/run/keys" in f"{SERVICES[name].get('environment')}{stages().get(name, ('', ''))[1]}"


def test_keys_are_made_once_before_anything_starts_and_no_secret_is_in_the_file(
    tmp_path: Path,
) -> None:
    """The folders that containers mount are those that `digenrl keys init` makes."""
    assert SERVICES["keys"]["command"] == "init" and SERVICES["keys"]["restart"] == "no"
    for name in set(SERVICES) - {"keys"}:
        condition = SERVICES[name]["depends_on"]["keys"]
        assert condition == {"condition": "service_completed_successfully"}
    make_deployment(
        tmp_path, BrokerAddresses(nats="nats:4222", redis="redis:6379", s3="http://s3:8333")
    )
    for name in set(SERVICES) - {"keys"}:
        assert (tmp_path / ROLE.get(name, f"brokers/{name}")).is_dir()
    for name in OURS:
        assert (tmp_path / ROLE[name] / "api_tokens.json").is_file()
    for folder, role in (("client", "viewer"), ("view", "operator")):
        token = (tmp_path / f"{role}.token").read_text().strip()
        assert (tmp_path / folder / "digenrl_api_token").read_text() == token
    text = (ROOT / "docker-compose.yml").read_text()
    assert "password" not in text.lower() and "OPEN_API" not in text


def test_only_api_and_page_are_published_and_only_on_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "scheduler": ["127.0.0.1:${DIGENRL_PORT:-8000}:8000"],
        "view": ["127.0.0.1:${DIGENRL_PAGE_PORT:-8001}:8000"],
    }
    assert COMPOSE["networks"]["backend"] == {"internal": True}
    for name, service in SERVICES.items():
        assert service["networks"] == (["backend", "api"] if name in published else ["backend"])


def test_containers_may_ask_each_service_by_its_name() -> None:
    """The report asks the scheduler by these names, and a Prometheus asks every service."""
    serving = set(SERVICES) - {*BROKERS, "report", "keys"}
    for name in serving:
        allowed = SERVICES[name]["environment"]["DIGENRL_ALLOWED_HOSTS"]
        assert set(allowed.partition(":-")[2].rstrip("}").split(",")) == serving


@pytest.mark.parametrize("name", OURS)
def test_a_service_starts_when_the_brokers_answer(name: str) -> None:
    depends = SERVICES[name]["depends_on"]
    assert set(depends) == {*BROKERS, "keys"}
    assert all(depends[broker] == {"condition": "service_healthy"} for broker in BROKERS)


@every_service
def test_a_service_is_a_target_of_the_one_dockerfile(name: str) -> None:
    build = SERVICES[name]["build"]
    target = "${REWARD_TARGET:-reward}" if name == "reward" else name
    assert (build["dockerfile"], build["target"]) == ("deploy/Dockerfile", target)
    image = DERIVED.get(name, name)
    assert "USER 65532:65532" in stages()[image][1]
    assert image == name or stages()[name][0] == image


@pytest.mark.parametrize("name", [name for name in OURS if name != "report"])
def test_a_service_listens_where_its_probe_asks_and_stays_when_its_run_is_finished(
    name: str,
) -> None:
    asked = SERVICES[name]["healthcheck"]["test"][-1]
    command = SERVICES[name]["command"]
    assert "http://127.0.0.1:8000/" in asked and "--host 0.0.0.0 --port 8000" in command
    assert '"--host", "0.0.0.0", "--port", "8000"' in stages()[name][1]
    assert name in ("scheduler", "view") or "--stay" in command


@pytest.mark.parametrize("name", OURS)
def test_an_image_holds_the_extra_named_after_its_service(name: str) -> None:
    extra = {"encoder": "rollout", "view": "report"}.get(name, name)  # it does some of its work
    assert f"--extra {extra}" in " ".join(installed(name))


@pytest.mark.parametrize(
    ("name", "lines"),
    [("scheduler", ["--extra scheduler"]),
     ("reward", ["--extra scheduler", "--extra reward --extra ocr"])],
)  # fmt: skip
def test_the_images_of_scheduler_and_reward_have_no_torch(name: str, lines: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert installed(name) == lines
    wanted = [
        each for extra in re.findall(r"--extra (\S+)", " ".join(lines)) for each in extras[extra]
    ]
    assert "torch" not in packages(project["dependencies"] + wanted, extras)
    for extra in ("rollout", "reward-models"):
        assert "torch" in packages(extras[extra], extras)
    assert "--extra reward-models" in " ".join(installed("reward-models"))


def test_a_change_of_the_code_installs_nothing() -> None:
    for name in OURS:
        parent = stages()[name][0]
        assert "COPY --from=code" not in stages()[parent][1] or parent == DERIVED.get(name)
    assert all("install-packages" not in stages()[name][1] for name in OURS)


def test_a_build_copies_only_what_the_dockerignore_lets_through() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    for source in re.findall(r"^COPY (?!--from)(?:--\S+ )*(\S+) \S+$", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).exists()
        assert f"!{source.split('/')[0]}" in lines


def test_a_build_works_without_a_registry_of_frontends() -> None:
    assert "syntax=" not in DOCKERFILE
    assert "pull" not in (ROOT / "docker-compose.yml").read_text()


def test_brokers_keep_what_they_have_acknowledged(tmp_path: Path) -> None:
    make_deployment(
        tmp_path, BrokerAddresses(nats="nats:4222", redis="redis:6379", s3="http://s3:8333")
    )
    assert "sync_interval: always" in (tmp_path / "brokers/nats/nats.conf").read_text()
    redis = (tmp_path / "brokers/redis/redis.conf").read_text().splitlines()
    assert {"appendonly yes", "appendfsync always", "maxmemory-policy noeviction"} <= set(redis)
    s3 = (ROOT / "deploy/brokers/s3").read_text()  # tests/local/test_power_cut.py: why each
    pragmas = parse_qs(seaweedfs.ENVIRONMENT["WEED_SQLITE_DBFILE"].split("?")[1])
    assert all(f"_pragma={pragma}" in s3 for pragma in pragmas["_pragma"])
    assert "fs.configure -locationPrefix=/ -fsync=true -apply" in s3
    assert s3.index("weed fix -ignoreError=true /data") < s3.index("exec weed mini")
    assert COMPOSE["x-build"]["args"]["S3_IMAGE"].endswith("_full}")  # the build with SQLite


def test_brokers_are_their_authors_images_and_those_from_wheels_are_asked_for() -> None:
    wheels = (ROOT / "deploy/brokers-from-wheels.env").read_text().splitlines()
    arguments = COMPOSE["x-build"]["args"]
    for name in ("NATS_IMAGE", "REDIS_IMAGE", "S3_IMAGE"):
        image = arguments[name].removeprefix(f"${{{name}:-").removesuffix("}")
        assert re.fullmatch(r"(?:nats|redis|chrislusf/seaweedfs):[0-9.]+(?:-alpine|_full)?", image)
        assert f"ARG {name}={image}" in DOCKERFILE.splitlines()
        assert f"{name}=brokers" in wheels


def test_no_password_is_in_an_image() -> None:
    for path in (ROOT / "deploy").rglob("*"):
        if path.is_file():
            assert "digenrl-local" not in path.read_text()


GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yml").read_text())


def test_one_container_has_all_gpus_and_takes_the_place_of_the_workers() -> None:
    host = GPU["services"]["host"]
    [devices] = host["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert {name for name, each in GPU["services"].items() if each.get("scale") == 0} == {
        "rollout", "trainer", "reward",
    }  # fmt: skip
    assert host["shm_size"] and host["environment"]["DIGENRL_GPUS"] == "${DIGENRL_GPUS:-}"


def test_the_container_of_a_host_has_no_more_rights_than_others_and_the_keys_of_its_roles() -> None:
    host = GPU["services"]["host"]
    for right in ("user", "read_only", "tmpfs", "cap_drop", "security_opt", "init", "restart"):
        assert host[right] == SERVICES["rollout"][right]
    mounts = [each for each in host["volumes"] if isinstance(each, dict)]
    assert {each["target"]: each["volume"]["subpath"] for each in mounts} == {
        f"/keys/{role}": role for role in ("rollout", "trainer", "reward", "encoder")
    }
    assert all(each["read_only"] for each in mounts)
    assert "chown 65532:65532 /cache /models" in stages()["host"][1]
