"""The 40 prompts of the digits demo: four ways to ask for each of ten digits."""

import json
from pathlib import Path

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a handwritten {word}",
    "the digit {word}",
    "the number {word}",
    "{word} written by hand",
)


def prompt_texts(digit: int) -> list[str]:
    return [template.format(word=WORDS[digit]) for template in TEMPLATES]


def all_prompts() -> list[tuple[str, int]]:
    """Returns (text, digit), by template and then by digit."""
    return [
        (template.format(word=word), digit)
        for template in TEMPLATES
        for digit, word in enumerate(WORDS)
    ]


def write_prompts(path: Path) -> None:
    """Returns JSON lines as a recipe's ``data.prompts`` reads them."""
    lines = (
        json.dumps({"prompt": text, "metadata": {"digit": digit}}) for text, digit in all_prompts()
    )
    path.write_text("".join(f"{line}\n" for line in lines))
