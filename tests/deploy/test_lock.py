"""What is installed: exact versions with hashes, and images that can be named by digest."""

import os
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BUILT_PER_DEVICE = re.compile(r"(torch|triton)$|(nvidia|cuda)-")
"""Packages of which a machine takes the build for its device, so that no hash fits all."""
LOCK = (ROOT / "requirements.lock").read_text()
LOCKED = {
    (name, version): re.findall(r"--hash=sha256:[0-9a-f]{64}", block)
    for block in re.split(r"\n(?=[a-z])", LOCK)
    for name, version in re.findall(r"^([a-z0-9.-]+)==([^ ]+)", block)
}


def installed(extra: str) -> set[str]:
    """Returns the names of all packages here that the extra leads to, ours left out."""
    found: set[str] = set()
    todo = [("digenrl", frozenset({extra}))]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(canonicalize_name(name))
        for text in distribution(name).requires or ():
            wanted = Requirement(text)
            chosen = ("", *extras)
            if not wanted.marker or any(wanted.marker.evaluate({"extra": one}) for one in chosen):
                todo.append((wanted.name, frozenset(wanted.extras)))
    return found - {"digenrl"}


def test_every_package_that_is_installed_is_locked_with_its_hashes() -> None:
    packages = {name for name in installed("dev") if not BUILT_PER_DEVICE.match(name)}
    assert len(packages) > 100
    assert packages - {name for name, _ in LOCKED} == set(), "make lock"
    assert all(LOCKED.values())


def test_the_lock_has_the_versions_of_the_constraints_and_names_no_place() -> None:
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    locked = {name for name, _ in LOCKED}
    assert [(n, v) for n, v in pins.items() if n in locked and (n, v) not in LOCKED] == []
    assert set(pins) - locked == {"torch", "uv"}, "not a dependency, or not locked"
    assert not [name for name in locked if BUILT_PER_DEVICE.match(name)]
    assert not re.search(r"://|/|@", LOCK)


@pytest.fixture
def docker(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in which `docker` knows the digest of every image but Redis'."""
    program = tmp_path / "docker"
    program.write_text(
        '#!/bin/sh\nfor image; do :; done\ncase "$image" in redis*) exit 1;; esac\n'
        'echo "sha256:$(echo "$image" | sha256sum | cut -c1-64)"\n'
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_images_are_named_by_digest_or_the_one_that_is_not_there_is(docker: dict[str, str]) -> None:
    done = subprocess.run(
        [ROOT / "deploy" / "pin-images"], env=docker, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(r"REDIS_IMAGE: no digest of redis:\S+; docker must .*\n", done.stderr)
    lines = done.stdout.splitlines()
    assert [line.split("=")[0] for line in lines] == ["BASE_IMAGE", "NATS_IMAGE"]
    assert all(re.search(r"=[a-z]+:\d\S+@sha256:[0-9a-f]{64}$", line) for line in lines)
