"""Alarms are added to a copy of the product as CONTRIBUTING says: one that follows from a run's
facts, and one of the scheduler. Each takes one file."""

from pathlib import Path

from tests.product_copy import Edits, copy_product, run_in_copy

READ_ALARM: Edits = {
    "digenrl/reading/alarms.py": (
        ("        *_skipped(", "        *_low_loss(facts.steps),\n        *_skipped("),
        (
            "def _skipped(",
            "def _low_loss(steps: Sequence[StepFacts]) -> list[str]:\n"
            "    low = [step.version for step in steps if step.metrics.get('loss', 0.0) < -1.0]\n"
            "    return [f'the loss of step {low[-1]} is below -1'] if low else []\n\n\n"
            "def _skipped(",
        ),
    )
}
SCHEDULER_ALARM: Edits = {
    "services/scheduler/shell/run_alarms.py": (
        (
            '            "nothing_trained":',
            '            "one_worker": "one worker does all" if len(workers) == 1 else "",\n'
            '            "nothing_trained":',
        ),
    )
}
READ = """
from pathlib import Path
from typer.testing import CliRunner
from digenrl.commands.cli import app
from digenrl.local.secrets.tokens import load_tokens
from tests.view.test_page import RUN, client_of, filled

folder = Path("run").resolve()
run = filled(folder)
client = client_of(run, load_tokens(folder))
lines = [line for line in client.get("/v1/status").json()["alarms"] if "loss" in line]
print(lines)
print(f'role="alert">{lines[0]}' in client.get("/").text)
command = ["status", RUN, "--runs", "run"]
said = CliRunner(env=run.environment).invoke(app, command).stdout.splitlines()
print([line for line in said if "loss" in line])
"""
SCHEDULE = """
from types import SimpleNamespace
from prometheus_client import REGISTRY
from digenrl.reading.alarms import alarms
from services.scheduler.core.state import State
from services.scheduler.shell.housekeeping import StreamWatch
from services.scheduler.shell.run_alarms import RunAlarms
from shared.messages import subjects
from shared.process.service import Health
from tests import examples, readings

found, said = RunAlarms(), []
bus = SimpleNamespace(full={}, seconds_unstored=0.0)
health = Health()
health.is_ready()
states = dict.fromkeys(stream.name for stream in subjects.STREAMS)
for workers in ([examples.status("trainer", "training")], []):
    watch = StreamWatch(
        bus, health, lambda: None, alarm=lambda what, reason: said.append((what, reason)),
        of_run=lambda: found.look(examples.plan(), State(), workers, (), 1.0),
    )
    watch._look_for_room(states, 0.0)
    shown = alarms(readings.facts(readings.run(alarms=[e for e in found.reasons.values() if e])))
    print(shown, REGISTRY.get_sample_value("digenrl_alarm", {"what": "one_worker"}))
print([reason for what, reason in said if what == "one_worker"])
"""


def test_an_alarm_of_a_reading_is_a_function_and_its_place(tmp_path: Path) -> None:
    copy_product(tmp_path, READ_ALARM)
    line = "the loss of step 4 is below -1"
    assert run_in_copy(tmp_path, READ) == [f"['{line}']", "True", f"['! {line}']"]


def test_an_alarm_of_the_scheduler_is_its_name_and_its_reason(tmp_path: Path) -> None:
    copy_product(tmp_path, SCHEDULER_ALARM)
    assert run_in_copy(tmp_path, SCHEDULE) == [
        "['one worker does all'] 1.0", "[] 0.0", "['one worker does all', '']",
    ]  # fmt: skip
