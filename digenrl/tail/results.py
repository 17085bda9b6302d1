"""Keeps what tail checks have found, by a digest of all that decides it. Runs refuse a tail
of which nothing is kept.

runs/.tail-checks/<digest>.json   beside the runs, so that deleting a run, or what it does not need,
                                  leaves it
"""

import hashlib
import json
from pathlib import Path
from shlex import quote

from pydantic import ValidationError

from digenrl.tail.agreement import Agreement
from shared.errors import UserError
from shared.messages.records import Digest, Record, Text
from shared.recipe.grid import sigmas_of
from shared.recipe.recipe import Recipe
from shared.run.files import digest_of

FOLDER = ".tail-checks"
DIGITS = 32
"""Number of hex digits of the digest in a file's name."""


class TailCheck(Record):
    """Holds what was measured of one tail."""

    digest: Digest
    model: Text
    """Name of the model's folder."""
    steps: int
    """Denoising steps without the tail."""
    num_steps: int
    """Denoising steps with it."""
    prompts: int
    samples: int
    """Samples of each prompt."""
    reward: Agreement
    """Agreement of the rewards by which samples are trained."""
    scorers: dict[str, Agreement]


def digest_of_tail(recipe: Recipe) -> str:
    """Return the SHA-256 of all that decides what a tail does to scores: model and scorers with
    their files' digests, size, both noise schedules, and where the samples of a group part."""
    sampling = recipe.sampling
    not_deciding = {"device", "folder", "lora", "trained", "vae_tiling"}
    deciding = {
        "model": recipe.model.model_dump(mode="json", exclude=not_deciding),
        "weights": digest_of(recipe.model.folder),
        "sigmas": [sigmas_of(sampling), sigmas_of(recipe.with_whole_grid.sampling)],
        "sampling": sampling.model_dump(
            mode="json", include={"window", "first_window_starts", "shared_noise"}
        ),
        "rewards": recipe.algorithm.rewards,
        "scorers": [
            {
                **scorer.model_dump(mode="json", exclude={"patience", "folder", "judge", "remote"}),
                "judge": scorer.judge
                and scorer.judge.model_dump(mode="json", exclude={"key_env", "key_file"}),
                "files": scorer.folder and digest_of(scorer.folder),
            }
            for scorer in recipe.reward.scorers
        ],
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def keep(runs: Path, check: TailCheck) -> Path:
    """Store a result, in place of an earlier one of the same digest."""
    path = _path(runs, check.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(check.model_dump_json(indent=1))
    return path


def known(runs: Path, recipe: Recipe) -> TailCheck | None:
    """Return what was found of the recipe's tail; None if nothing was, or it cannot be read."""
    path = _path(runs, digest_of_tail(recipe))
    try:
        return TailCheck.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def check_tail(recipe: Recipe, path: Path, runs: Path) -> None:
    """Refuse a tail of which nothing is known, or that ranks samples otherwise than all steps do.

    Args:
        path: the recipe's file, to name it in the command that measures.

    Raises:
        UserError: one line with the command, or with what was measured.
    """
    sampling = recipe.sampling
    if sampling.tail is None:
        return
    found = known(runs, recipe)
    if found is None:
        raise UserError(
            f"sampling.tail: nobody has measured whether {sampling.num_steps} steps rank this "
            f"model's samples as all {sampling.steps} do; run `digenrl tail-check "
            f"{quote(str(path))}` first"
        )
    reason = why_refused(recipe, found)
    if reason is not None:
        raise UserError(f"sampling.tail: {reason}")


def tail_line(recipe: Recipe, path: Path, runs: Path) -> str:
    """Say what is known of the recipe's tail, for `digenrl check`."""
    sampling, found = recipe.sampling, known(runs, recipe)
    of = f"{sampling.num_steps} of {sampling.steps} steps"
    if found is None:
        return f"sampling.tail: {of}; run `digenrl tail-check {quote(str(path))}` before a run"
    reason = why_refused(recipe, found)
    if reason is not None:
        return f"sampling.tail: {reason}"
    return (
        f"sampling.tail: {of} rank a group's samples as all do with a correlation of "
        f"{found.reward.within:.2f}"
    )


def why_refused(recipe: Recipe, found: TailCheck) -> str | None:
    """Return why a tail of which so much is known may not be used; None if it may."""
    sampling, within = recipe.sampling, found.reward.within
    if within is None:
        return (
            f"in none of {found.prompts} groups do rewards differ, so that nothing can be said of "
            "a tail; leave it out, or measure with more --prompts and --samples"
        )
    if within < sampling.tail_correlation:
        return (
            f"rewards by {found.num_steps} steps rank a group's samples as those by all "
            f"{found.steps} do with a correlation of {within:.2f} only, less than "
            f"sampling.tail_correlation = {sampling.tail_correlation:g}; use more steps than "
            f"{sampling.tail}, or leave the tail out"
        )
    return None


def _path(runs: Path, digest: str) -> Path:
    return runs / FOLDER / f"{digest[:DIGITS]}.json"
