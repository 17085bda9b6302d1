"""Weights & Biases without a network: what it would send, read back from its files."""

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from digenrl.evaluation.records import Evaluations
from shared.run.log import Log
from tests.follow.runs import RUN, Run, metrics_of
from tests.view.stored import stored_run

BLOCK, HEADER = 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4
pytestmark = pytest.mark.run  # it starts a service of its own, in seconds


def follow(run: Run, folder: Path, mode: str = "offline") -> "subprocess.CompletedProcess[str]":
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "digenrl", "follow", "--run", RUN, "--wandb", "digits", "--once"],
        env={**run.environment, "WANDB_MODE": mode, "WANDB_DIR": str(folder), "WANDB_API_KEY": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def records(folder: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record  # which no other test needs

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return [Record.FromString(data) for path in files for data in chunks(path.read_bytes())]


def chunks(log: bytes) -> Iterator[bytes]:
    """Reads a log in blocks: each piece has a checksum, its length, and whether it ends a chunk."""
    at, chunk = HEADER.size, b""
    while at < len(log):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK  # too little is left of the block
            continue
        _, size, kind = HEADER.unpack_from(log, at)
        chunk += log[at + HEADER.size : at + HEADER.size + size]
        at += HEADER.size + size
        if kind in (WHOLE, LAST):
            yield chunk
            chunk = b""


def steps(folder: Path) -> list[dict[str, float]]:
    """What was logged, a step at a time."""
    rows = [record.history for record in records(folder) if record.HasField("history")]
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in rows
    ]


@pytest.mark.slow
def test_an_evaluation_s_panel_joins_the_newest_step(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    asyncio.run(Evaluations(run.store, RUN, "a" * 64).announce(Log.of_evaluations(run.store, RUN)))
    for _ in range(2):
        ended = follow(run, tmp_path / "w")
        assert ended.returncode == 0, ended.stderr
    logged = steps(tmp_path / "w")
    assert [row["_step"] for row in logged] == [1, 2, 3, 4]
    captions = [row.get("samples.captions") for row in logged]
    assert captions[:3] == [None] * 3 and captions[3] is not None
    assert [str(each)[:10] for each in captions[3]] == ["version 0:", "version 4:"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_each_step_is_kept_once_for_later(tmp_path: Path) -> None:
    run = Run(tmp_path / "objects").begin()
    for more in (2, 0, 1):
        run.commit(more)
        ended = follow(run, tmp_path / "w")
        assert ended.returncode == 0, ended.stderr
    logged = steps(tmp_path / "w")
    assert [row["_step"] for row in logged] == [1, 2, 3]
    for step, row in enumerate(logged, 1):
        assert {name: row[name] for name in metrics_of(step)} == metrics_of(step)
    runs = [record.run for record in records(tmp_path / "w") if record.HasField("run")]
    assert {(each.project, each.display_name) for each in runs} == {("digits", RUN)}
    assert len({each.run_id for each in runs}) == 1
