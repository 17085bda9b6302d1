"""The log of a service whose disk is full, or whose reader has gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
"""Refuses everything that is written, for want of room."""
LOGS = """
import logging
import structlog
from shared import telemetry

telemetry.configure_logs(service="rollout", worker="rollout-0", run="r")
for number in range(3):
    structlog.get_logger().info("generated", number=number)
logging.getLogger("uvicorn").warning("closed")
print("goes on")
"""


def said(stderr: int) -> str:
    """Run a process that logs, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", LOGS], stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
    )
    return done.stdout


@pytest.mark.skipif(not FULL.exists(), reason="no device that is full")
def test_a_service_goes_on_while_its_log_has_no_room() -> None:
    full = os.open(FULL, os.O_WRONLY)
    try:
        assert said(full) == "goes on\n"
    finally:
        os.close(full)


def test_a_service_goes_on_after_the_reader_of_its_log_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert said(write) == "goes on\n"
    finally:
        os.close(write)
