"""Questions for a judge, by the name that a recipe gives. The questions are worded in this project,
also where they match the training of a published reward model; the questions of UnifiedReward are
its authors' (CodeGoat24/UnifiedReward, MIT)."""

from collections.abc import Mapping

ANSWER_FORMAT = """\
Answer with one number from 0 ({worst}) to {highest} ({best}), and nothing else."""


def _question(question: str, worst: str, best: str, *, what: str = "This picture was") -> str:
    # Names in braces that are left are filled in for each sample.
    end = ANSWER_FORMAT.replace("{worst}", worst).replace("{best}", best)
    return f"{what} made for the following description.\n\n{{prompt}}\n\n{question} {end}"


_FRAMES = "These are frames of one video, in their order. It was"

_UNIFIED = """\
You are presented with a generated {media} and its associated text caption. Your task is to \
analyze the {media} across multiple dimensions in relation to the caption. Specifically:
Provide overall assessments for the {media} along the following axes (each rated from 1 to 5):
- Alignment Score: How well the {media} matches the caption in terms of content.
- {axis} Score: {asked}
- Style Score: How {how} appealing the {media} looks, regardless of caption accuracy.

Output your evaluation using the format below:

Alignment Score (1-5): X
{axis} Score (1-5): Y
Style Score (1-5): Z

Your task is provided as follows:
Text Caption: [{{prompt}}]"""
_IMAGES = _UNIFIED.format(
    media="image",
    axis="Coherence",
    asked="How logically consistent the image is (absence of visual glitches, object distortions, "
    "etc.).",
    how="aesthetically",
)
_VIDEOS = _UNIFIED.format(
    media="video",
    axis="Physics",
    asked="How well the gravity, movements, collisions, and interactions make physical sense.",
    how="visually",
)

PUBLISHED: Mapping[str, tuple[str, ...]] = {
    f"unified-reward-{media}{axis and '-' + axis.lower()}": (axis,) if axis else axes
    for media, axes in {
        "image": ("Alignment", "Coherence", "Style"),
        "video": ("Alignment", "Physics", "Style"),
    }.items()
    for axis in ("", *axes)
}
"""Axes whose mean is the score, by the name of a question that its model was trained on: a line of
the answer rates each from 1 to `HIGHEST`."""
HIGHEST = 5.0

RUBRICS: Mapping[str, str] = {
    **{name: _IMAGES if "-image" in name else _VIDEOS for name in PUBLISHED},
    "preference": _question(
        "Imagine that many people see this picture and others that were made for the same "
        "description, and choose the one they would keep. They look at composition, light and "
        "colour, detail, bodies and hands that are right, and whether it is what was asked for.",
        "nobody would choose it",
        "everybody would",
    ),
    "fit": _question(
        "Go through the description: each thing, its number, colour, place, what it does, and each "
        "text that is to be read. Judge what share of this the picture shows, and do not judge how "
        "beautiful it is.",
        "nothing of it is there",
        "all of it is",
    ),
    "edit": _question(
        "The first picture is the original, the second one the edited version. Judge whether the "
        "edit does what was asked for, all of it and nothing else: what was not asked to change "
        "has to stay as it was.",
        "nothing of it, or all is changed",
        "just as asked",
        what="The second picture is an edited version of the first one, and was",
    ),
    "video-quality": _question(
        "Judge how the single frames look: sharp, free of noise and blocks, things whole and of a "
        "right shape. Do not judge motion, or the description.",
        "broken",
        "like a good recording",
        what=_FRAMES,
    ),
    "video-motion": _question(
        "Judge the motion from frame to frame: whether things move as they would, stay what they "
        "are, and neither flicker nor melt. A video in which nothing moves though the description "
        "asks for it is at 0.",
        "wrong or none",
        "as in the world",
        what=_FRAMES,
    ),
    "video-fit": _question(
        "Judge what share of the description the video shows: its things, what they do, in which "
        "order, and how the camera moves. Do not judge how beautiful it is.",
        "nothing of it is there",
        "all of it is",
        what=_FRAMES,
    ),
}
