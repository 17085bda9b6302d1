"""``python -m bench sim`` as it is typed."""

import json

import pytest
from typer.testing import CliRunner

from bench.cli import bench
from shared.errors import UserError


def _run(*words: str) -> str:
    result = CliRunner().invoke(bench, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_bad_input_is_refused_in_one_line() -> None:
    sim = ("sim", "--profile", "qwen-image", "--rollout", "h100=1", "--trainer", "h100=1")
    for words, start in {
        (*sim, "--tag", "some"): "--tag: 'some' is neither a number nor auto nor off",
        (*sim, "--tag", "99"): "--tag: 99 groups of 32; at most all of them",
        (*sim, "--fragment-size", "5"): "--fragment-size: 5 does not divide the group; these do: 1",
        (*sim, "--batches", "0"): "--batches: at least 1",
        (*sim, "--variant", "full"): "1 H100 are no shard groups of 8; give a multiple",
        (*sim, "--mode", "colocated"): "--mode: colocated has no split",
        (*sim, "--mode", "serial"): "--mode: input should be 'disaggregated', 'sequential'",
        (*sim, "--mode", "sequential", "--staleness", "1"): "--staleness: 1 needs schedule.mode",
        (*sim[:3], "--rollout", "4090=1", "--trainer", "h100=1"): "qwen-image needs 41.5 GiB",
    }.items():
        result = CliRunner().invoke(bench, list(words))
        assert isinstance(result.exception, UserError)
        (line,) = str(result.exception).splitlines()
        assert line.startswith(start)


def test_a_simulated_configuration() -> None:
    words = ("sim", "--profile", "qwen-image", "--rollout", "h100=2", "--trainer", "h100=14",
             "--fragment-size", "8", "--tag", "28", "--batches", "2")  # fmt: skip
    shown = _run(*words)
    assert "split: 2 H100 : 14 H100" in shown
    assert "TAG up to 28 groups (fixed)" in shown
    found = json.loads(_run(*words, "--json"))
    (row,) = found["rows"]
    assert row["step_seconds"] == pytest.approx(71.5, rel=0.03)
    assert row["staleness"] == {"0": 1.0}
    assert row["busy"]["trainer"]["generate"] > 0.5


@pytest.mark.slow
def test_techniques_side_by_side() -> None:
    words = ("sim", "--profile", "qwen-image", "--rollout", "h100=8", "--trainer", "h100=8",
             "--fragment-size", "8", "--batches", "2", "--compare")  # fmt: skip
    shown = _run(*words)
    assert all(name in shown for name in ("sequential", "+ GAP", "+ TSP", "+ TAG", "+ one-step"))
    assert "colocated: 2026-06 141" in shown
    rows = json.loads(_run(*words, "--json"))["rows"]
    assert rows[0]["step_seconds"] > 1.8 * rows[-1]["step_seconds"]
    assert {row["fragment_size"] for row in rows} == {8}
