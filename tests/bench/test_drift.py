"""New figures beside the committed ones: which rows are compared, and what has moved."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.drift import drift, rows_of, show_drift
from bench.stored import RESULTS, TWO_DEVICES

COMMITTED = Path(__file__).parent / "committed"
"""Results as they were once published."""

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.drift.RESULTS", COMMITTED)


def quick(folder: Path, change: Change = lambda _: None, *, of: str = "qwen-image-32") -> Path:
    """Writes a committed case as `make bench-quick` would have: fewer modes, one round."""
    where = RESULTS if of == TWO_DEVICES else COMMITTED
    result = json.loads((where / f"{of}.json").read_text())
    if of != TWO_DEVICES:
        result["modes"] = [mode for mode in result["modes"] if mode["mode"] in ("naive", "tag")]
        for mode in result["modes"]:
            mode["batch_seconds"] = mode["batch_seconds"][:1]
            mode["mode"] = mode["mode"].replace("naive", "sequential")
    change(result)
    (folder / f"{of}.json").write_text(json.dumps(result))
    return folder


def shown(folder: Path) -> str:
    console = Console(width=170)
    with console.capture() as captured:
        show_drift(folder, console)
    return re.sub(r" +", " ", captured.get())


def test_the_same_figures_have_not_moved(tmp_path: Path) -> None:
    assert shown(quick(tmp_path)) == "nothing moved by more than 5 %; rows compared: 2\n"


def test_a_figure_that_moved_is_shown_with_its_row_and_ratio(tmp_path: Path) -> None:
    def slower(result: dict[str, Any]) -> None:
        result["modes"][1]["step_seconds"] *= 1.06
        result["modes"][0]["step_seconds"] *= 1.04

    [moved] = drift(rows_of(quick(tmp_path, slower)), rows_of(COMMITTED)).moved
    assert (moved.row.workload, moved.row.mode) == ("qwen-image", "tag")
    assert moved.figure == "step_seconds" and moved.ratio == pytest.approx(1.06)
    text = shown(tmp_path)
    split = moved.row.split
    assert f"│ qwen-image │ {split} │ tag │ step_seconds │ 33.1 │ 35.08 │ 1.060 │" in text
    assert "nothing moved" not in text


def test_faster_is_moved_as_well_and_messages_and_cores_are_summed(tmp_path: Path) -> None:
    def fewer(result: dict[str, Any]) -> None:
        for mode in result["modes"][:1]:
            mode["messages"]["DG_TASK"] = mode["messages"]["DG_REW"] = 0.0
            mode["cpu"] = {name: 2 * cores for name, cores in mode["cpu"].items()}

    found = drift(rows_of(quick(tmp_path, fewer)), rows_of(COMMITTED)).moved
    ratios = {each.figure: each.ratio for each in found}
    assert ratios.keys() == {"messages_per_batch", "cores"}
    assert ratios["messages_per_batch"] == pytest.approx(0.5, abs=0.01)
    assert ratios["cores"] == pytest.approx(2.0)


def test_a_row_of_other_settings_is_named_and_not_compared(tmp_path: Path) -> None:
    def other_help(result: dict[str, Any]) -> None:
        result["modes"][1] |= {"tag": 17, "step_seconds": 99.0}

    text = shown(quick(tmp_path, other_help))
    assert "nothing moved by more than 5 %; rows compared: 1" in text
    assert "tag: committed with tag = 31 (new: 17)" in text


def test_a_mode_that_was_never_committed_is_named(tmp_path: Path) -> None:
    def renamed(result: dict[str, Any]) -> None:
        result["modes"][0]["mode"] = "sorcery"

    assert "sorcery: no committed row of this mode" in shown(quick(tmp_path, renamed))


def test_two_devices_are_compared_by_their_speeds_where_batches_are_smaller(tmp_path: Path) -> None:
    def small(result: dict[str, Any]) -> None:
        for part, words in result["changes"].items():
            now = words.replace("trainer.order = arrival", "trainer.deterministic = False")
            result["changes"][part] = now.replace("batch.groups = 10", "batch.groups = 6")
        result["parts"]["equal"]["seconds_per_sample"]["trainer-0"]["train"] *= 1.5

    found = drift(rows_of(quick(tmp_path, small, of=TWO_DEVICES)), rows_of(RESULTS))
    assert found.num_compared == 2, "the speeds of both parts"
    [moved] = found.moved
    assert moved.figure == "trainer-0: train s/sample" and moved.ratio == pytest.approx(1.5)
    rows = {place[1:]: said for place, said in found.alone.items()}
    assert rows["equal", "sequential"] == "committed with batch.groups = 10 (new: 6)"
    assert len(rows) == 5 + 2


def test_two_devices_of_the_same_settings_are_compared_row_by_row(tmp_path: Path) -> None:
    found = drift(rows_of(quick(tmp_path, of=TWO_DEVICES)), rows_of(RESULTS))
    assert (found.moved, found.alone, found.num_compared) == ([], {}, 9)
