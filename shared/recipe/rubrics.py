"""Questions for a judge, by the name that a recipe gives. The words are this project's own, also
where a question asks for what a published reward model was trained to tell."""

from collections.abc import Mapping

ANSWER = """\
Answer with one number from 0 ({worst}) to {highest} ({best}), and nothing else."""


def _question(asked: str, worst: str, best: str, *, what: str = "This picture was") -> str:
    # Names in braces that are left are filled in for each sample.
    end = ANSWER.replace("{worst}", worst).replace("{best}", best)
    return f"{what} made for the following description.\n\n{{prompt}}\n\n{asked} {end}"


_FRAMES = "These are frames of one video, in their order. It was"

RUBRICS: Mapping[str, str] = {
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
