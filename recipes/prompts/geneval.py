"""Writes geneval.jsonl and geneval.held-out.jsonl next to this file: prompts in GenEval's format
(Ghosh et al. 2023, djghosh13/geneval, prompts/evaluation_metadata.jsonl), made here and not copied.

The six tags and their wording are GenEval's: one object, two objects, a count, a colour, a
position, and the colours of two objects; classes come from COCO. A held-out prompt differs
from all others.
"""

import json
import random
from itertools import cycle
from pathlib import Path
from typing import Any

CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat",
    "traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog",
    "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella",
    "handbag", "suitcase", "frisbee", "snowboard", "kite", "skateboard", "surfboard", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange",
    "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "bed", "toilet",
    "laptop", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase",
    "teddy bear", "toothbrush",
)  # fmt: skip
COLOURS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)  # fmt: skip
DIRECTIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLURALS = {"knife": "knives", "person": "people", "sheep": "sheep", "bus": "buses"}
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
TRAINED, HELD_OUT, SEED = 240, 48, 0


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(name: str) -> str:
    ends = ("s", "ch", "sh")
    return PLURALS.get(name, f"{name}es" if name.endswith(ends) else f"{name}s")


def prompt_of(tag: str, draw: random.Random) -> dict[str, Any]:
    """Return a row with this tag."""
    one, other = draw.sample(CLASSES, 2)
    red, blue = draw.sample(COLOURS, 2)
    count, where = draw.choice([*NUMBERS]), draw.choice(DIRECTIONS)
    first, second = {"class": one, "count": 1}, {"class": other, "count": 1}
    match tag:
        case "single_object":
            return row(tag, [first], article(one))
        case "two_object":
            return row(tag, [first, second], f"{article(one)} and {article(other)}")
        case "counting":
            several, more = ([{"class": one, "count": n}] for n in (count, count + 1))
            return row(tag, several, f"{NUMBERS[count]} {plural(one)}", exclude=more)
        case "colors":
            return row(tag, [{**first, "color": red}], article(f"{red} {one}"))
        case "position":
            seen = [first, {**second, "position": [where, 0]}]
            return row(tag, seen, f"{article(other)} {where} {article(one)}")
    coloured = [{**first, "color": red}, {**second, "color": blue}]
    said = f"{article(f'{red} {one}')} and {article(f'{blue} {other}')}"
    return row(tag, coloured, said)


def row(tag: str, include: list[dict[str, Any]], said: str, **more: Any) -> dict[str, Any]:
    return {"tag": tag, "include": include, **more, "prompt": f"a photo of {said}"}


def write(folder: Path) -> None:
    made: dict[str, dict[str, Any]] = {}
    draw = random.Random(SEED)
    for tag in cycle(TAGS):
        each = prompt_of(tag, draw)
        made.setdefault(each["prompt"], each)
        if len(made) == TRAINED + HELD_OUT:
            break
    rows = [json.dumps(each) + "\n" for each in made.values()]
    (folder / "geneval.jsonl").write_text("".join(rows[:TRAINED]))
    (folder / "geneval.held-out.jsonl").write_text("".join(rows[TRAINED:]))


if __name__ == "__main__":
    write(Path(__file__).parent)
