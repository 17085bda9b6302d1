"""Reads a file with a reward function of the user's own, without running it.

    # /// script
    # dependencies = ["numpy<2"]
    # ///
    def score(image, prompt):
        return image.mean() / 255

The names of its parameters define the arguments of a function, and how many samples a call gets:

    image            one sample: pixels (H, W, C), uint8; of a video, one frame after another
    frames           one sample: a video (F, H, W, C)
    images, videos   all samples of a prompt that are scored together: (n, H, W, C), (n, F, H, W,
        C)
    prompt, metadata, source_images       arguments of the prompt
    any other name                        the value of that name in the prompt's metadata

The comment is inline metadata (PEP 723); with it, the function runs in an environment of its own.
"""

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.reward import limits
from shared.errors import UserError
from shared.recipe.rewards import FUNCTION, ScorerTable

SAMPLE_PARAMETERS, GROUP_PARAMETERS = ("image", "frames"), ("images", "videos")
VIDEO_PARAMETERS = ("frames", "videos")
PROMPT_PARAMETERS = ("prompt", "metadata", "source_images")
PARAMETERS = (*SAMPLE_PARAMETERS, *GROUP_PARAMETERS, *PROMPT_PARAMETERS)
INLINE_METADATA = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""The block of inline metadata, as PEP 723 defines it."""


@dataclass(frozen=True, slots=True)
class Parameters:
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Those with a value by default."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.needed + self.optional

    @property
    def takes_many(self) -> bool:
        return any(name in GROUP_PARAMETERS for name in self.names)

    @property
    def takes_videos(self) -> bool:
        return any(name in VIDEO_PARAMETERS for name in self.names)


@dataclass(frozen=True, slots=True)
class RewardFile:
    path: Path
    text: str
    function: str
    parameters: Parameters
    dependencies: tuple[str, ...] = ()
    """Packages of its own environment, as its inline metadata name them."""
    python: str | None = None
    """Versions of Python that it asks for."""
    has_own_environment: bool = False
    """Whether the function runs in its own environment, because the file has inline metadata."""

    @classmethod
    def read(cls, path: Path, function: str = FUNCTION) -> Self:
        """Read the file.

        Raises:
            UserError: one line that begins with `source`, if there is no such function, or one that
                cannot be called.
        """
        return cls.parse(_read_text(path), path, function)

    @classmethod
    def parse(cls, text: str, path: Path, function: str) -> Self:
        """Parse the text of a file; raises UserError as `read`."""
        try:
            module = ast.parse(text, filename=str(path))
        except (SyntaxError, ValueError) as error:
            line = error.lineno if isinstance(error, SyntaxError) else None
            where = "" if line is None else f":{line}"
            raise UserError(f"source: {path}{where}: is not Python: {error}") from None
        parameters = _check_parameters(_definition(module, path, function), f"{path}:{function}")
        inline = _inline(text, path)
        return cls(path, text, function, parameters, *inline)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def check_names(self, metadata: Iterable[Iterable[str]]) -> None:
        """Check that every prompt's metadata have what the function asks for by name.

        Raises:
            UserError: one line with the name and those that are there.
        """
        required = set(self.parameters.needed) - set(PARAMETERS)
        for names in metadata:
            missing = sorted(required - set(names))
            if missing:
                allowed = ", ".join([*PARAMETERS, *sorted(names)])
                raise UserError(
                    f"source: {self.path}:{self.function} asks for {missing[0]!r}, which the "
                    f"metadata of a prompt do not have; known are: {allowed}"
                )


def read_table(table: ScorerTable) -> RewardFile:
    """Read the file that a recipe's table names, and check that its functions fit the table.

    Raises:
        UserError: one line that begins with the key of the table.
    """
    assert table.source is not None
    file = RewardFile.read(table.source, table.function)
    if table.scores == "groups" and not file.parameters.takes_many:
        raise UserError(
            f'scores: {file.path}:{file.function} takes one sample; of "groups" it has to ask for '
            + " or ".join(GROUP_PARAMETERS)
        )
    return file


def parse_source(source: str, field: str) -> tuple[Path, str]:
    """Return the file and the function that a command was given as ``field``.

    Raises:
        UserError: if there is no function of that name.
    """
    path, function = split_source(source)
    if not function.isidentifier():
        raise UserError(f"{field}: {function!r} is no name of a function; name one, {path}:score")
    return path, function


def split_source(source: str) -> tuple[Path, str]:
    """Return the file and the function of `file.py:function`.

    >>> split_source("a/my_reward.py")
    (PosixPath('a/my_reward.py'), 'score')
    """
    file, colon, function = source.rpartition(":")
    return (Path(file), function or FUNCTION) if colon else (Path(source), FUNCTION)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > limits.MAX_BYTES:
            mib = limits.MAX_BYTES >> 20
            raise UserError(f"source: {path} has more than {mib} MiB; it is no source")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UserError(f"source: cannot read {path}: {reason}") from None


def _definition(module: ast.Module, path: Path, function: str) -> ast.arguments:
    functions = {
        each.name: each
        for each in module.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if function not in functions:
        names = ", ".join(sorted(functions)) or "none"
        raise UserError(
            f"source: {path} has no function {function!r}; functions there: {names}; name one, "
            f'source = "{path.name}:name"'
        )
    if isinstance(functions[function], ast.AsyncFunctionDef):
        raise UserError(f"source: {path}:{function} is async; make it a plain function")
    return functions[function].args


def _check_parameters(arguments: ast.arguments, what: str) -> Parameters:
    if arguments.posonlyargs or arguments.vararg or arguments.kwarg:
        raise UserError(
            f"source: {what} has parameters without a name of their own (/, * or **); give it "
            f"those that it needs, such as {', '.join(PARAMETERS)}"
        )
    plain = [each.arg for each in arguments.args]
    first = len(plain) - len(arguments.defaults)
    named = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    needed = plain[:first] + [each.arg for each, default in named if default is None]
    optional = plain[first:] + [each.arg for each, default in named if default is not None]
    parameters = Parameters(tuple(needed), tuple(optional))
    media = [name for name in parameters.names if name in (*SAMPLE_PARAMETERS, *GROUP_PARAMETERS)]
    if len(media) != 1:
        raise UserError(
            f"source: {what} asks for {' and '.join(media) or 'no samples'}; it has to ask for one "
            f"of {', '.join((*SAMPLE_PARAMETERS, *GROUP_PARAMETERS))}"
        )
    return parameters


def _inline(text: str, path: Path) -> tuple[tuple[str, ...], str | None, bool]:
    """Return the packages and the Python of the file's inline metadata, and whether it has any."""
    match = INLINE_METADATA.search(text)
    if match is None:
        return (), None, False
    lines = match["content"].splitlines()
    try:
        metadata = tomllib.loads("\n".join(line[2:] for line in lines))
        dependencies, python = metadata.get("dependencies", []), metadata.get("requires-python")
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"source: {path}: its inline metadata are no TOML: {error}") from None
    are_texts = isinstance(dependencies, list) and all(isinstance(e, str) for e in dependencies)
    if not are_texts or not isinstance(python, str | None):
        raise UserError(
            f"source: {path}: of its inline metadata, dependencies is a list of texts, and "
            "requires-python is a text"
        )
    return tuple(dependencies), python, True
