"""The judge of the editing demo, and its reward, on edits that are right, wrong or none."""

import numpy as np
import pytest

from bench.digits.data import to_uint8
from bench.digits.editing import EDITS
from digenrl.evaluation.digits import Images, load_real
from services.reward.reward_file import RewardFile
from services.reward.scorers.digits_edit import DigitEdit, recognise_edit
from tests.paths import ROOT

REWARDS = ROOT / "models" / "digits-rewards"
NUM = 60


def judged(asked: str, images: Images) -> float:
    real = load_real(REWARDS)
    sources = to_uint8(real.images[:NUM])
    metadata = [
        {"edit": asked, "digit": int(digit), "source_images": (source,)}
        for digit, source in zip(real.labels[:NUM], sources, strict=True)
    ]
    return float(np.mean(DigitEdit(REWARDS).score(to_uint8(images), metadata)))


@pytest.mark.parametrize("made", EDITS)
def test_the_judge_tells_edits_apart(made: str) -> None:
    edited = EDITS[made](load_real(REWARDS).images[:NUM])
    shares = {asked: judged(asked, edited) for asked in EDITS}
    assert shares.pop(made) > 0.8 and max(shares.values()) == 0


def test_an_image_that_is_not_changed_is_no_edit_nor_is_another_digit() -> None:
    images = load_real(REWARDS).images[:NUM]
    assert [judged(asked, images) for asked in EDITS] == [0, 0, 0]
    assert judged("invert", EDITS["invert"](np.roll(images, 1, axis=0))) < 0.3
    assert recognise_edit(to_uint8(images)[0, 0], np.zeros((8, 8), np.uint8)) is None


def test_the_demo_s_reward_is_1_for_the_edit_that_was_asked_for_and_less_for_others() -> None:
    file = RewardFile.read(ROOT / "recipes" / "edit_reward.py")
    space: dict[str, object] = {}
    exec(compile(file.text, str(file.path), "exec"), space)
    score = space["score"]
    images = load_real(REWARDS).images[:1]
    source = to_uint8(images)[0].transpose(1, 2, 0)
    for made, edit in EDITS.items():
        sample = to_uint8(edit(images))[0].transpose(1, 2, 0)
        scores = {asked: float(score(sample, [source], asked)) for asked in EDITS}  # type: ignore[operator]
        assert scores.pop(made) > 0.9 and max(scores.values()) < 0.75
