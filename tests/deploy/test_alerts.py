"""The alerts of deploy/observability: each fires on its fault, and none on a run without one.

Prometheus' own promtool evaluates them. A series of a fault begins as on a clean run.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import yaml

from services.scheduler.core.throughput import BatchForecast
from shared.learning.metrics import STEP_METRICS
from tests.paths import ROOT

FOLDER = ROOT / "deploy" / "observability"
RULES = FOLDER / "alerts.yml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "run.json").read_text())
LABELS = 'job="digenrl",run="digits",instance="{}"'
HOURS = 2
MINUTES = 60 * HOURS
Series = dict[str, str]
"""Values of each series, a minute apart, in promtool's notation."""


def series(name: str, values: str, *, of: str = "scheduler", **labels: str) -> Series:
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return {f"{name}{{{LABELS.format(of)}{more}}}": values}


def merged(*parts: Series) -> Series:
    return {name: values for part in parts for name, values in part.items()}


def constant(value: float) -> str:
    return f"{value}+0x{MINUTES}"


def from_minute(minute: int, value: float, *, before: float = 0) -> str:
    return f"{before}+0x{minute - 1} {value}+0x{MINUTES - minute}"


PHASES = ("waiting", "running", "paused", "stopped", "finished", "failed")


def phase(of: str, since: int = 30) -> Series:
    """Running first, then another phase."""
    is_on = {name: from_minute(since, 1) if name == of else constant(0) for name in PHASES}
    is_on["running"] = from_minute(since, 0, before=1) if of != "running" else constant(1)
    return merged(*(series("digenrl_phase", on, phase=name) for name, on in is_on.items()))


CLEAN = merged(
    phase("running"),
    *(series("up", constant(1), of=name) for name in ("scheduler", "rollout-0", "trainer")),
    series("digenrl_leader", constant(1)),
    series("digenrl_leader", constant(0), of="scheduler-1"),
    series("digenrl_fenced_total", constant(0), what="command"),
    series("digenrl_missing_workers", constant(0), service="rollout"),
    series("digenrl_missing_workers", constant(0), service="reward"),
    *(series("digenrl_queue_late", constant(0), queue=name) for name in ("in_hand", "scoring")),
    series("digenrl_redeliveries_total", f"0+0.1x{MINUTES}", of="reward", stream="DG_TRAJ"),
    series("digenrl_alarm", constant(0), what="nats_stores_nothing"),
    series("digenrl_alarm", constant(0), what="stream_full"),
    series("digenrl_alarm", constant(0), what="store_takes_nothing"),
    series("digenrl_alarm", constant(0), what="redis_takes_nothing"),
    series("digenrl_announcements_refused_total", constant(0)),
    series("digenrl_seconds_since_commit", constant(30)),
    series("digenrl_seconds_per_step", constant(60)),
    series("digenrl_dead_letters", constant(0)),
    series("digenrl_dead_letters_found_total", constant(0)),
    series("digenrl_dlq_messages", constant(2)),
    series("digenrl_onpolicy_ratio_error", constant(1e-6)),
    series("digenrl_effective_sample_share", constant(1)),
    series("digenrl_skipped_not_finite", constant(0)),
    series("digenrl_failed_fraction", constant(0.01)),
    series("digenrl_zero_advantage_fraction", constant(0.2)),
    series("digenrl_evaluation_alarms", constant(0), of="evaluation"),
)  # fmt: skip

FAULTS: Mapping[str, Series] = {
    "DigenrlServiceDown": series("up", from_minute(30, 0, before=1), of="rollout-0"),
    "DigenrlNoScheduler": series("digenrl_leader", from_minute(30, 0, before=1)),
    "DigenrlTwoSchedulers": series("digenrl_leader", from_minute(30, 1), of="scheduler-1"),
    "DigenrlCommandsRefused": series("digenrl_fenced_total", from_minute(115, 3), what="command"),
    "DigenrlWorkersMissing": series(
        "digenrl_missing_workers", from_minute(30, 1), service="rollout"
    ),
    "DigenrlWorkRepeated": series(
        "digenrl_redeliveries_total", f"0+5x{MINUTES}", of="reward", stream="DG_TRAJ"
    ),
    "DigenrlQueueLate": series("digenrl_queue_late", from_minute(30, 1), queue="scoring"),
    "DigenrlNatsStoresNothing": series(
        "digenrl_alarm", from_minute(30, 1), what="nats_stores_nothing"
    ),
    "DigenrlStoreTakesNothing": series(
        "digenrl_alarm", from_minute(30, 1), what="store_takes_nothing"
    ),
    "DigenrlStreamFull": series("digenrl_alarm", from_minute(30, 1), what="stream_full"),
    # A counter with labels is not there before its first event.
    "DigenrlObjectDamaged": series(
        "digenrl_corrupt_objects_total", f"_x110 1+0x{MINUTES - 110}", of="trainer", what="commit"
    ),
    "DigenrlForeignAnnouncement": series(
        "digenrl_announcements_refused_total", from_minute(115, 1)
    ),
    "DigenrlRunFailed": phase("failed"),
    "DigenrlRunStands": phase("paused"),
    "DigenrlRunStalled": series("digenrl_seconds_since_commit", f"0+60x{MINUTES}"),
    "DigenrlDeadLetters": series("digenrl_dead_letters", from_minute(30, 1)),
    "DigenrlWorkFails": series("digenrl_dead_letters_found_total", from_minute(115, 3)),
    "DigenrlMessagesUnreadable": series("digenrl_dlq_messages", from_minute(115, 3, before=2)),
    "DigenrlRatiosDiffer": series("digenrl_onpolicy_ratio_error", from_minute(30, 0.02)),
    "DigenrlFewEffectiveSamples": series(
        "digenrl_effective_sample_share", from_minute(30, 0.55, before=1)
    ),
    "DigenrlStepsNotTaken": series("digenrl_skipped_not_finite", from_minute(30, 1)),
    "DigenrlSamplesWithoutScore": series("digenrl_failed_fraction", from_minute(30, 0.1)),
    "DigenrlNoSignal": series("digenrl_zero_advantage_fraction", from_minute(30, 0.95)),
    "DigenrlRewardHacked": series("digenrl_evaluation_alarms", from_minute(30, 1), of="evaluation"),
}
FIRED = re.compile(r"name: (\w+),\s+alertname: ?(\w+)")


def promtool() -> str:
    """Return the path of Prometheus' tool. Without it, CI fails; elsewhere the test is skipped."""
    unpacked = ROOT / "build" / "prometheus" / "usr" / "bin" / "promtool"
    found = shutil.which("promtool") or (str(unpacked) if unpacked.exists() else None)
    if found is None:
        reason = "no promtool is installed: it is in Debian's package prometheus"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    return found


def fired(folder: Path, cases: Mapping[str, Series]) -> dict[str, set[str]]:
    """Return which alerts fire at the end of each case.

    promtool compares with what is expected; nothing is, so that it names all that fire."""
    tests = [
        {
            "name": name, "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in given.items()],
            "alert_rule_test": [
                {"eval_time": f"{MINUTES - 1}m", "alertname": alert, "exp_alerts": []}
                for alert in ALERTS
            ],
        }
        for name, given in cases.items()
    ]  # fmt: skip
    path = folder / "cases.yml"
    fields = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    path.write_text(json.dumps(fields))
    command = [promtool(), "test", "rules", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, set[str]] = {name: set() for name in cases}
    for name, alert in FIRED.findall(ended.stdout + ended.stderr):
        found[name].add(alert)
    assert (ended.returncode == 0) == (not any(found.values())), ended.stderr
    return found


@pytest.mark.slow
def test_every_alert_fires_on_its_fault_alone_and_none_on_a_clean_run(tmp_path: Path) -> None:
    assert set(FAULTS) == set(ALERTS)
    cases = {"clean": CLEAN, **{name: CLEAN | fault for name, fault in FAULTS.items()}}
    assert fired(tmp_path, cases) == {"clean": set(), **{name: {name} for name in FAULTS}}


def names_in(texts: Iterable[str]) -> set[str]:
    return set(re.findall(r"\bdigenrl_\w+", " ".join(texts)))


def exported() -> set[str]:
    """Return the names of all metrics of all services."""
    from prometheus_client import REGISTRY

    import digenrl.evaluation.progress
    import services.scheduler.shell.metrics as metrics

    assert digenrl.evaluation.progress.VERSION
    look = metrics.RUN.look
    figures = metrics.RunFigures(
        "running", {"rollout": 1}, (), 1.0, 1.0, forecast=BatchForecast(1.0, 1.0)
    )
    metrics.RUN.look = lambda: figures
    try:
        families = list(REGISTRY.collect())
    finally:
        metrics.RUN.look = look
    names = {f"digenrl_{name}" for name in STEP_METRICS}
    names |= {f"digenrl_scorer_{name}" for name in ("reward_mean", "reward_std")}
    for family in families:
        names.add(family.name)
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, ())}
    return names


def test_alerts_and_dashboards_ask_for_metrics_that_services_export() -> None:
    known = exported()
    asked = names_in(rule["expr"] for rule in ALERTS.values())
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    shown = names_in(target["expr"] for panel in panels for target in panel["targets"])
    assert asked - known == set() and shown - known == set()
    assert len(shown) > 25
    assert names_in(FAULTS["DigenrlDeadLetters"]) - known == set()


def test_every_alert_says_what_to_do() -> None:
    for name, rule in ALERTS.items():
        assert set(rule["annotations"]) == {"summary", "remedy"}, name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name


def test_the_documents_list_the_alerts() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    listed = dict(re.findall(r"^\| `(Digenrl\w+)` \| (\w+) \|", text, flags=re.MULTILINE))
    assert listed == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}


def test_prometheus_and_grafana_run_with_no_more_rights_than_services() -> None:
    added = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for name, service in added.items():
        assert service["user"] == "65532:65532" and service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name


def test_prometheus_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    command = [promtool(), "check", "rules", str(RULES)]
    assert "SUCCESS" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shutil.copy(RULES, tmp_path)
    text = (FOLDER / "prometheus.yml").read_text()
    (tmp_path / "token").write_text("secret")
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("/run/keys/digenrl_api_token", str(tmp_path / "token")))
    command = [promtool(), "check", "config", str(config)]
    subprocess.run(command, capture_output=True, text=True, check=True)
