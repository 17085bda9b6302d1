"""Log lines of a run are found by word, service and level, without secrets."""

import json
import os
import time
from pathlib import Path

import pytest

from digenrl.api.run_logs import MAX_LINES, search_logs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose two services have logged in turn."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for name, second in (("reward-0", 1), ("trainer-0", 2)):
        line = {"ts": f"2026-01-01T00:00:0{second}.000Z", "level": "info", "event": "started"}
        failed = {**line, "ts": "2026-01-01T00:00:05.000Z", "level": "error", "event": "failed"}
        text = "\n".join(map(json.dumps, (line, {**failed, "reason": f"NaN of {name}"})))
        (logs / f"{name}.log").write_text(f"{text}\n")
    return tmp_path


def test_lines_of_all_services_are_in_the_order_of_time(run: Path) -> None:
    found = search_logs(run, "", "", "debug")

    assert found.processes == ["reward-0", "trainer-0"]
    assert [line.split()[1] for line in found.lines[:2]] == ["reward-0", "trainer-0"]


@pytest.mark.parametrize(
    ("word", "process", "level", "lines"),
    [("nan OF", "", "debug", 2), ("", "reward-0", "error", 1), ("none", "", "debug", 0)],
)
def test_word_service_and_level_choose(
    run: Path, word: str, process: str, level: str, lines: int
) -> None:
    assert len(search_logs(run, word, process, level).lines) == lines


def test_lines_of_brokers_have_times_and_levels_and_a_traceback_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    logs = {
        "nats": "[7] 2026/11/29 22:38:04.452500 [WRN] Slow consumer",
        "objects": "  Starting\nI1129 22:38:05.826567 s3.go:312 filer",
        "trainer-0": '{"ts": "2026-11-29T13:38:06Z", "level": "info", "event": "step"}\n'
        "Traceback (most recent call last):\n  File x\nValueError: NaN",
        "valkey": "8:M 29 Nov 2026 22:38:04.443 # Memory overcommit",
    }
    (tmp_path / "logs").mkdir()
    for name, text in logs.items():
        (tmp_path / "logs" / f"{name}.log").write_text(f"{text}\n")
        os.utime(tmp_path / "logs" / f"{name}.log", (1796000000, 1796000000))
    assert search_logs(tmp_path, "", "", "debug").lines == [
        "objects info:   Starting",
        "13:38:04.443 valkey warning: Memory overcommit",
        "13:38:04.452 nats warning: Slow consumer",
        "13:38:05.826 objects info: s3.go:312 filer",
        "13:38:06Z trainer-0 info: step",
        "13:38:06Z trainer-0 error: Traceback (most recent call last):",
        "13:38:06Z trainer-0 error:   File x",
        "13:38:06Z trainer-0 error: ValueError: NaN",
    ]
    assert len(search_logs(tmp_path, "", "trainer-0", "error").lines) == 3
    monkeypatch.undo()
    time.tzset()


def test_secrets_are_left_out_and_only_the_newest_lines_are_shown(run: Path) -> None:
    secrets = 'http://x/sign-in?code=Zm9v authorization: Bearer abc {"s3_secret_key": "def"}'
    (run / "logs" / "up.log").write_text(f"{secrets}\n" * (MAX_LINES + 5))

    found = search_logs(run, "", "up", "debug")

    assert len(found.lines) == MAX_LINES
    assert not any(secret in found.lines[0] for secret in ("Zm9v", "abc", "def"))


def test_a_run_without_a_folder_here_has_no_lines() -> None:
    assert search_logs(None, "", "", "debug").processes == []
