"""What tests of deployments need, and the name of what is missing where they are skipped."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def needs_docker() -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is missing")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers")


@pytest.fixture(scope="session")
def tool() -> Callable[[str], Path]:
    """Finds a program of `make deploy-tools` in the environment of the tests."""

    def find(name: str) -> Path:
        path = Path(sys.prefix) / "bin" / name
        if not path.exists():
            pytest.skip(f"{name} is missing; make deploy-tools installs it")
        return path

    return find
