"""The day on a GPU, rehearsed: parts are apart, what is done is kept, a report says it all."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest
from rich.console import Console

from bench.gpu_day import day
from bench.gpu_day.day import RESERVE_S, Day, Part, run_day
from bench.gpu_day.passes import FORMS, GRADIENTS
from bench.gpu_day.report import markdown
from shared.errors import UserError
from tests.paths import ROOT


def test_without_a_gpu_it_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    console = Console(quiet=True)
    with pytest.raises(UserError, match="no CUDA device here; --cpu --tiny rehearses"):
        run_day(Day(tmp_path), tmp_path, console, again=False, only=())
    with pytest.raises(UserError, match="--cpu: takes hours at full size; add --tiny"):
        run_day(Day(tmp_path, cpu=True), tmp_path, console, again=False, only=())
    with pytest.raises(UserError, match="--part: speed is none of families-cpu"):
        run_day(Day(tmp_path), tmp_path, console, again=False, only=("speed",))


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_takes_nothing_from_the_others_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(day, "PARTS", {
        "families": Part(title="F", work="-", minutes=2),
        "memory": Part(title="M", work="-", minutes=2),
        "profile": Part(title="P", work="-", minutes=0.001),
    })  # fmt: skip
    monkeypatch.setattr(day, "argv_of", lambda name, given: [
        "/bin/sh", "-c", f"cd {ROOT} && {SHELL[name].format(folder=given.folder)}"
    ])  # fmt: skip
    rehearsed = Day(tmp_path, cpu=True, tiny=True)
    console = Console(quiet=True)
    for _ in range(2):
        assert not run_day(rehearsed, tmp_path / "out", console, again=False, only=())
    report = (tmp_path / "out" / "cpu.md").read_text()
    assert "| F | **failed**: status 1 |" in report
    assert "| M | done |" in report and "All within 10%: yes." in report
    assert "| P | **failed**: not done within 0 s |" in report
    content = json.loads((tmp_path / "out" / "cpu.json").read_text())
    assert content["parts"]["families"]["log"] == ["illegal memory access"]
    assert (tmp_path / "count").read_text() == "1\n", "what is done is not done again"
    assert (tmp_path / "tries").read_text() == "1\n1\n", "what has failed is"


SHELL = {
    "families": "echo 1 >> {folder}/tries; echo illegal memory access; exit 1",
    "memory": (
        'echo 1 >> {folder}/count; echo \'{{"rows": {{}}, "within": 0.1, "passed": true}}\' '
        "> {folder}/parts/memory.found"
    ),
    "profile": "sleep 600",
}


STUBS = {
    "hangs": (
        "trap '' TERM; echo 1 >> {folder}/tries; echo '{{}}' > {folder}/parts/hangs.found; "
        "setsid sleep 61.7 & (setsid sleep 61.8 &); sleep 61.9 & wait"
    ),
    "quick": "echo 1 >> {folder}/count; echo '{{}}' > {folder}/parts/quick.found",
    "large": "echo '{{}}' > {folder}/parts/large.found",
    "waits": "sleep 61.6 & wait",
}


def _stubs(monkeypatch: pytest.MonkeyPatch, **minutes: float) -> None:
    parts = {name: Part(title=name, work="-", minutes=each) for name, each in minutes.items()}
    monkeypatch.setattr(day, "PARTS", parts)
    monkeypatch.setattr(day, "QUARTER", tuple(parts))
    monkeypatch.setattr(day, "GRACE_S", 0.3)
    monkeypatch.setattr(
        day, "argv_of", lambda name, of: ["/bin/sh", "-c", STUBS[name].format(folder=of.folder)]
    )


def _processes(word: str) -> list[str]:
    """Returns the command lines that have a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text().replace("\0", " "))
    return [line for line in found if word in line]


def test_a_quarter_is_bounded_and_the_next_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stubs(monkeypatch, hangs=1 / 60, large=1, quick=5 / 60)
    rehearsed = Day(tmp_path, cpu=True, tiny=True, quarter=0.5)
    console, began = Console(quiet=True), time.monotonic()
    assert not run_day(rehearsed, tmp_path, console, again=False, only=())
    assert time.monotonic() - began < 20
    assert _processes("sleep 61.") == [], "what left the part's session was ended as well"
    report = tmp_path / "cpu-quarter.md"
    for line in ("| hangs | **failed**: not done within 1 s |", "| large | not run |"):
        assert line in report.read_text()

    rehearsed = replace(rehearsed, quarter=3)
    assert not run_day(rehearsed, tmp_path, console, again=False, only=())
    names = ("quick", "large", "hangs")
    made = [(tmp_path / "parts" / f"{name}.json").stat().st_mtime_ns for name in names]
    assert made == sorted(made), "what has failed comes last"
    assert (tmp_path / "count").read_text() == "1\n", "what is done is not done again"
    assert "| large | done |" in report.read_text()


def test_sigterm_ends_the_part_and_leaves_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stubs(monkeypatch, waits=1)
    rehearsed = Day(tmp_path, cpu=True, tiny=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    timer = Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        with pytest.raises(SystemExit):
            run_day(rehearsed, tmp_path, Console(quiet=True), again=False, only=())
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, before)
    assert _processes("sleep 61.6") == []
    assert "| waits | **failed**: interrupted |" in (tmp_path / "cpu.md").read_text()


def test_a_quarter_counts_the_seconds_that_python_takes_to_start() -> None:
    code = (
        "import time; time.sleep(1); from bench.gpu_day.day import process_age as age; print(age())"
    )
    began = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    assert 1 <= age <= time.monotonic() - began + 0.1


def test_a_quarter_fits_into_eight_minutes_and_three() -> None:
    limits = [60 * day.PARTS[name].minutes for name in day.QUARTER]
    assert sum(limits[:4]) <= 8 * 60 - RESERVE_S
    assert sum(limits[4:]) <= 3 * 60 - RESERVE_S


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sigterm_leaves_no_process_of_the_services(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench", "gpu-day", "--cpu", "--tiny", "--folder", str(tmp_path),
            "--part", "services-steady"]  # fmt: skip
    command = subprocess.Popen(argv, cwd=ROOT)
    began = time.monotonic()
    while not _processes(f"{tmp_path}/steady/runs/") and time.monotonic() - began < 200:
        time.sleep(0.2)
    assert len(_processes(str(tmp_path))) > 2
    command.terminate()
    assert command.wait(60) == 128 + signal.SIGTERM
    assert _processes(str(tmp_path)) == []
    assert "**failed**: interrupted" in (tmp_path / "cpu.md").read_text()


def test_a_report_can_be_written_before_any_part_has_run() -> None:
    names = tuple(day.PARTS)
    content = {"device": "NVIDIA H100", "tiny": False, "parts": {name: {} for name in names}}
    text = markdown(content, {name: name for name in names})
    assert text.count("| not run |") == len(names)


def test_a_report_says_what_failed_what_waited_and_what_the_shipped_profile_has() -> None:
    step = {"step": 0.1, "first_step": 2.0, "finish": 0.8, "samples": 8, "weights_bytes": 2**30}
    taken = {"pass": 0.2, "first_group": 3.0, "onpolicy_ratio_error": 0.0, "waits": None}
    passes = {
        "rows": 4,
        "denoising": {
            "bfloat16": {**step, "waits": {}},
            "fp8": {"failed": "RuntimeError: no kernel"},
            "streamed": {**step, "waits": {"hooks/group_offloading.py:7": 2}},
        },
        "training": {"both": taken},
    }
    shipped = {"rollout": {"sample_seconds": 0.1}, "variants": {"lora": {}},
               "sources": {"rollout.sample_seconds": {"kind": "fitted"}}}  # fmt: skip
    measured = ("rollout.sample_seconds", "variants.lora.call_factor")
    profile = {
        "name": "flux1-dev@H100", "rollout": {"sample_seconds": 0.2},
        "variants": {"lora": {"call_factor": 1.5}}, "shipped": shipped,
        "sources": {path: {"kind": "measured"} for path in measured},
    }  # fmt: skip
    commits = {"adapter_gb": 2.0, "copied_gb": 6.0, "held": 0.6, "process_group_of_one": None}
    found = {"passes": passes, "profile-flux1-dev": profile, "commits": commits}
    parts = {name: {"status": "done", "found": each} for name, each in found.items()}
    content = {"device": "GPU", "tiny": False, "parts": parts}
    text = markdown(content, {name: name for name in parts})
    assert "| bfloat16 | 100.0 | 2.0 | 100.0 | 1.00 | nowhere |" in text
    assert "| fp8 | **RuntimeError: no kernel** |  |  |  |  |" in text
    assert "| 2 x hooks/group_offloading.py:7 |" in text
    assert "| both | 200.0 | 3.0 | 0.0e+00 | not counted on a CPU |" in text
    assert "| rollout.sample_seconds | 0.2 | 0.1 (fitted) | 2.00 x |" in text
    assert "| variants.lora.call_factor | 1.5 | - | - |" in text
    assert "| copy, into kept buffers: the lanes are held | 0.6000 | 0.100 |" in text


@pytest.mark.night
@pytest.mark.timeout(1500)
def test_the_whole_day_in_miniature_on_the_cpu(tmp_path: Path) -> None:
    rehearsed = Day(tmp_path / "day", cpu=True, tiny=True)
    assert run_day(rehearsed, tmp_path, Console(quiet=True), again=False, only=())
    found = json.loads((tmp_path / "cpu.json").read_text())["parts"]
    for family, types in found["families"]["found"].items():
        if family != "device":
            assert max(types["float32"]["ratio_error"].values()) <= 1e-6, family
            assert max(types["bfloat16"]["ratio_error"].values()) <= 1e-2, family
    assert found["services"]["found"]["commits"] == 2
    assert found["services-lent"]["found"]["commits"] == 2
    passes = found["passes"]["found"]
    assert set(passes["denoising"]) == set(FORMS) - {"compiled"}
    assert set(passes["training"]) == set(GRADIENTS)
    forms = [form for kind in ("denoising", "training") for form in passes[kind].values()]
    assert not [form["failed"] for form in forms if "failed" in form]
    commits = found["commits"]["found"]
    assert 0 < commits["held"] < commits["published"] < commits["checkpointed"]
    assert found["profile-flux1-dev"]["found"]["shipped"]["name"] == "flux1-dev"
    assert found["memory"]["found"]["passed"] is None, "a CPU counts nothing"
