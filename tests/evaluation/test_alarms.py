"""A gold reward that falls while the training reward rises is said aloud."""

from digenrl.evaluation.records import Quality, alarms


def quality(reward: float, **gold: float) -> Quality:
    return Quality(reward=reward, num_samples=8, gold=gold)


def test_a_gold_reward_that_falls_raises_an_alarm() -> None:
    [line] = alarms([quality(0.2, taste=5.0, text=0.1), quality(0.8, taste=4.5, text=0.3)])
    assert "rose from 0.2 to 0.8" in line
    assert "taste fell from 5 to 4.5" in line


def test_otherwise_there_is_none() -> None:
    better = quality(0.8, taste=5.0)
    assert alarms([better]) == []
    assert alarms([quality(0.2, taste=5.0), better]) == []
    assert alarms([quality(0.9, taste=6.0), better]) == [], "the training reward fell as well"
    assert alarms([quality(0.2), quality(0.8)]) == []


def test_the_first_evaluation_is_what_the_newest_is_compared_with() -> None:
    between = quality(0.5, taste=9.0)
    [line] = alarms([quality(0.2, taste=5.0), between, quality(0.8, taste=4.5)])
    assert "from 0.2 to 0.8" in line and "from 5 to 4.5" in line


def test_two_falls_in_a_row_raise_an_alarm_before_the_gold_reward_is_below_its_first() -> None:
    risen = [quality(0.2, taste=1.0), quality(0.4, taste=5.0)]
    once = [*risen, quality(0.5, taste=4.0)]
    assert alarms(once) == []
    [line] = alarms([*once, quality(0.6, taste=3.0)])
    assert line.startswith("at the last two evaluations ")
    assert "rose from 0.4 to 0.6" in line and "taste fell from 5 to 3" in line
    assert alarms([*once, quality(0.45, taste=3.0)]) == [], "the training reward fell in between"
    assert alarms([*once, quality(0.6, taste=4.5)]) == [], "it has risen again"


def test_a_gold_reward_that_is_new_is_compared_with_nothing() -> None:
    assert alarms([quality(0.2), quality(0.8, taste=4.5)]) == []


def test_a_share_of_samples_that_falls_by_more_than_chance_is_an_alarm() -> None:
    def judged(reward: float, network: float, svm: float = 0.5) -> Quality:
        return Quality(reward=reward, num_samples=200, gold_accuracy=network, gold_svm_accuracy=svm)

    first = judged(8.3, 0.552)
    [line] = alarms([first, judged(18.0, 0.113)])
    assert line.endswith("while the accuracy of the held-out network fell from 0.552 to 0.113")
    assert alarms([first, judged(18.0, 0.5)]) == [], "200 samples may differ by that much"
    assert alarms([first, judged(8.0, 0.113)]) == []
    assert len(alarms([first, judged(18.0, 0.1, 0.1)])) == 2
