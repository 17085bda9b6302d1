"""What a person sees of a local run, and how Ctrl-C ends its evaluation."""

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.display import Display, make_console
from digenrl.local.up import EXIT_INTERRUPTED, run_to_end
from digenrl.reading.wording import describe_work
from tests.readings import load, run, worker

RUNNING = run(run="digits", step=3, eta_seconds=60.0, waiting_for="rollout")
LAST = run(
    run="digits", phase="finished", step=30, reward_mean=0.9, eta_seconds=0.0, waiting_for="nothing"
)
WORKER = worker(host="alpha", device="NVIDIA H100", gpu="5", use=None)


def test_the_table_says_on_which_host_and_gpu_each_worker_is() -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=160), "url", "logs")
    cpu = worker(worker="reward-0", host="alpha", device="cpu", gpu="")
    with display.shown():
        display.update(RUNNING, [WORKER, cpu])
    lines = screen.getvalue().splitlines()
    rollout = next(line for line in lines if "rollout-0" in line).split()
    assert rollout[:5] == ["rollout-0", "alpha", "NVIDIA", "H100", "5"]
    assert next(line for line in lines if "reward-0" in line).split()[:4] == [
        "reward-0", "alpha", "cpu", "-",
    ]  # fmt: skip


def test_the_table_has_throughput_and_what_is_late() -> None:
    screen = io.StringIO()
    display = Display(Console(file=screen, force_terminal=True, width=160), "url", "logs")
    with display.shown():
        display.update(RUNNING, [WORKER], load())
    text = screen.getvalue()
    assert "10 samples are trained per second; the schedule's forecast is 20" in text
    assert "waiting: 96 generation, 8 in hand, 0 scoring, 8 training" in text
    assert "the oldest at rollout-0 for 61 s where 1.7 s are usual" in text


def test_a_line_says_what_a_step_waits_for_and_the_last_one_that_the_run_is_finished() -> None:
    plain = io.StringIO()
    display = Display(Console(file=plain, width=160), "url", "logs")
    with display.shown():
        display.update(RUNNING, [])
        display.update(LAST, [])
    assert plain.getvalue().splitlines() == [
        "step 3/30  reward 0.500  ETA 1 min 0 s",
        "step 30/30  reward 0.900  finished",
    ]


def test_a_paused_run_waits_for_no_service() -> None:
    plain = io.StringIO()
    display = Display(Console(file=plain, width=160), "url", "logs")
    with display.shown():
        display.update(run(phase="paused", step=3, waiting_for="operator"), [])
    assert plain.getvalue() == "step 3/30  reward 0.500  paused\n"


def test_with_quantised_weights_a_line_says_how_much_the_samples_count() -> None:
    plain = io.StringIO()
    display = Display(Console(file=plain, width=160), "url", "logs", weighted=True)
    with display.shown():
        display.update(RUNNING.model_copy(update={"effective_sample_share": 0.974}), [])
    assert "reward 0.500  samples count 97%  ETA 1 min 0 s" in plain.getvalue()


def test_a_shortage_of_memory_is_said_once_with_what_the_device_does_since_and_the_remedy() -> None:
    plain = io.StringIO()
    display = Display(Console(file=plain, width=300), "url", "logs")
    short = worker(
        memory_shortage={
            "what": "a denoising step of 8 samples of 512 x 512 x 1", "since": "4 at a time",
            "remedy": "schedule.fragment_size of at most 4", "count": 1,
        }
    )  # fmt: skip
    with display.shown():
        display.update(RUNNING, [WORKER])
        display.update(RUNNING, [short])
        display.update(RUNNING, [short])
    assert plain.getvalue().splitlines()[1:] == [
        "rollout-0 was out of memory: a denoising step of 8 samples of 512 x 512 x 1; since then "
        "4 at a time; schedule.fragment_size of at most 4"
    ]
    assert describe_work(short) == "generates"


async def test_ctrl_c_ends_the_evaluation_at_the_end_at_once(tmp_path: Path) -> None:
    supervisor, interrupted = Supervisor(tmp_path, {}), asyncio.Event()
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    running = asyncio.create_task(run_to_end(supervisor, sleeps, {}, interrupted))
    assert not (await asyncio.wait({running}, timeout=0.2))[0]
    interrupted.set()
    assert await asyncio.wait_for(running, 10) == EXIT_INTERRUPTED
    ends = [sys.executable, "-c", "import sys; sys.exit(7)"]
    assert await run_to_end(supervisor, ends, {}, asyncio.Event()) == 7


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("/runs [x]/a [/b]")
    assert capsys.readouterr().out == "/runs [x]/a [/b]\n"


def test_the_display_says_for_whom_a_device_waits_and_why_it_is_refused() -> None:
    waits = {"activity": "waiting_for_trainer", "use": "tail"}
    assert describe_work(worker(**waits)) == "nothing left in this batch"
    lacks = worker(activity="waiting_for_conditions", note="no encoder has")
    assert describe_work(lacks) == "waits for encoded prompts"
    assert describe_work(worker(activity="loading_weights")) == "loading weights"
    assert describe_work(worker(service="trainer", lent=True)) == "generates (lent)"
    assert describe_work(worker(**waits, refused="too small")) == "refused: too small"


def test_for_programs_stdout_gets_each_change_once_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display(Console(stderr=True), "http://scheduler", "logs", lines=True)
    with display.shown():
        for each in (run(step=1), run(step=1), run(step=2)):
            display.update(each, [])
        display.say("draining the services")
    out, err = capsys.readouterr()
    assert [json.loads(line)["step"] for line in out.splitlines()] == [1, 2]
    assert "draining" in err
