"""Pictures: that they are drawn, and show what they are given."""

from pathlib import Path

from bench.runner.figures import Interval
from bench.runner.plots import Bar, bars, timeline


def texts(path: Path) -> str:
    """An SVG names its texts in comments."""
    return path.read_text()


def test_bars_name_modes_and_bounds(tmp_path: Path) -> None:
    given = [Bar("sequential", 68.0, 66.0, 70.0, 67.0), Bar("tag", 36.0, 36.0, 36.0)]
    bars(tmp_path / "steps.svg", "a title", given, bounds={"the bound": 30.5})
    drawn = texts(tmp_path / "steps.svg")
    for text in ("sequential", "tag", "a title", "the bound (30.5 s)", "measured", "simulated"):
        assert f"<!-- {text} -->" in drawn


def test_a_timeline_has_a_row_per_device_and_shows_what_is_in_it(tmp_path: Path) -> None:
    spans = [
        Interval("rollout-00", "generate", 0.0, 2.0),
        Interval("rollout-00", "adopt", 2.0, 2.5),
        Interval("trainer-00", "train", 1.0, 3.0),
        Interval("trainer-00", "commit", 9.0, 9.5),
    ]
    timeline(
        tmp_path / "line.svg", "two devices", spans, begin=1.0, end=4.0, marks={"version 1": 3.0},
        seconds_per_second=10.0,
    )  # fmt: skip
    drawn = texts(tmp_path / "line.svg")
    for text in ("rollout-00", "trainer-00", "generate", "adopt", "train", "idle", "version 1"):
        assert f"<!-- {text} -->" in drawn
    assert "<!-- commit -->" not in drawn, "it is after the end"
