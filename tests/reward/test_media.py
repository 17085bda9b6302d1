"""Rewards without weights, of images and of videos."""

import numpy as np
import numpy.typing as npt
import pytest

from services.reward.kinds import KINDS
from services.reward.scorer import WeightedScorer, build_scorers
from services.reward.scorers.jpeg import jpeg_bytes
from shared.recipe.rewards import ScorerTable

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (3, 32, 48), dtype=np.uint8)
FLAT = np.full((3, 32, 48), 90, np.uint8)


def scorer(kind: str) -> WeightedScorer:
    [built] = build_scorers([ScorerTable(name="s", type=kind)])
    return built


def score(kind: str, media: npt.NDArray[np.uint8]) -> list[float]:
    return scorer(kind).score(media, [{}] * len(media))


def test_noise_is_harder_to_compress_than_a_plain_colour() -> None:
    images = np.stack([NOISE, FLAT])
    rich, plain = score("jpeg-incompressibility", images)
    assert rich == jpeg_bytes(NOISE) / 1000 and rich > 2 * plain
    small, large = score("jpeg-compressibility", images)
    assert small == -rich / 500 and small < large < 0


def test_a_gray_image_is_a_file_of_one_channel() -> None:
    assert jpeg_bytes(NOISE[:1]) < jpeg_bytes(np.repeat(NOISE[:1], 3, axis=0))
    with pytest.raises(ValueError, match="no shape"):
        jpeg_bytes(np.zeros((2, 8, 8), np.uint8))


def test_a_scorer_of_images_gives_a_video_the_mean_of_its_frames() -> None:
    videos = np.stack([[NOISE, FLAT, FLAT], [FLAT, FLAT, FLAT]])
    mixed, plain = score("jpeg-incompressibility", videos)
    rich, flat = jpeg_bytes(NOISE) / 1000, jpeg_bytes(FLAT) / 1000
    assert mixed == pytest.approx((rich + 2 * flat) / 3)
    assert plain == pytest.approx(flat)


def test_frames_are_scored_with_the_metadata_of_their_prompt() -> None:
    seen = []

    class Looks:
        def score(self, media: object, metadata: list[dict[str, object]], /) -> list[float]:
            seen.extend(metadata)
            return [1.0] * len(metadata)

    videos = np.stack([[FLAT, FLAT], [NOISE, NOISE]])
    WeightedScorer("looks", 1.0, Looks()).score(videos, [{"a": 1}, {"a": 2}])  # type: ignore[arg-type]
    assert seen == [{"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}]


def test_a_scorer_that_leaves_a_frame_out_is_found_out() -> None:
    class Lazy:
        def score(self, media: object, metadata: object, /) -> list[float]:
            return [1.0]

    with pytest.raises(ValueError, match="gave 1 scores for 4 frames"):
        WeightedScorer("lazy", 1.0, Lazy()).score(np.stack([[FLAT, FLAT]] * 2), [{}, {}])


def test_flicker_is_less_consistent_than_a_still() -> None:
    black, white = np.zeros_like(FLAT), np.full_like(FLAT, 255)
    videos = np.stack([[FLAT] * 4, [black, white, black, white], [black, black, white, white]])
    assert score("temporal-consistency", videos) == pytest.approx([1.0, 0.0, 2 / 3])


def test_a_scorer_of_videos_takes_no_images_and_no_single_frames() -> None:
    with pytest.raises(ValueError, match="scores videos"):
        score("temporal-consistency", NOISE[None])
    with pytest.raises(ValueError, match="one frame"):
        score("temporal-consistency", NOISE[None, None])


def test_every_type_says_what_it_needs() -> None:
    assert {name for name, kind in KINDS.items() if kind.needs == "folder"} == {
        "aesthetic", "clip-score", "digit-edit", "digit-probability", "hpsv2", "hpsv3",
        "image-reward", "objects", "pick-score", "video-align", "video-align-motion",
        "video-align-quality", "video-align-text",
    }  # fmt: skip
    assert all((kind.needs == "folder") >= bool(kind.files) for kind in KINDS.values())
    for kind in KINDS.values():
        assert (kind.network is not None) == (kind.extra == "reward-models"), "its memory is known"
    assert {name.split("-")[0] for name, kind in KINDS.items() if kind.takes == "videos"} == {
        "temporal", "video",
    }  # fmt: skip
