"""A gold reward that falls while the training reward rises is said aloud."""

from digenrl.report.make import alarms
from digenrl.report.summary import Quality


def quality(reward: float, **gold: float) -> Quality:
    return Quality(reward=reward, num_samples=8, gold=gold)


def test_a_gold_reward_that_falls_raises_an_alarm() -> None:
    [line] = alarms(quality(0.2, taste=5.0, text=0.1), quality(0.8, taste=4.5, text=0.3))
    assert "rose from 0.2 to 0.8" in line
    assert "taste fell from 5 to 4.5" in line


def test_otherwise_there_is_none() -> None:
    better = quality(0.8, taste=5.0)
    assert alarms(quality(0.2, taste=5.0), better) == []
    assert alarms(quality(0.9, taste=6.0), better) == [], "the training reward fell as well"
    assert alarms(quality(0.2), quality(0.8)) == []
