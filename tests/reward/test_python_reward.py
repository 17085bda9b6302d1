"""A reward function of the user's own: what it is given, and what its faults cost."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from pydantic import ValidationError
from typer.testing import CliRunner

from digenrl.commands.cli import app
from services.reward.reward_file import RewardFile, read_table
from services.reward.scorer import WeightedScorer, build_scorers, check_prompts
from services.reward.scorers.python_file import PythonScorer
from services.reward.scoring import ScoringOutcome, score_each
from services.reward.server import create_app
from services.reward.wire import MSGPACK
from shared.errors import UserError
from shared.messages.contracts import Prompt
from shared.process.service import Health
from shared.recipe.rewards import ScorerTable

FAULTS = """
import math, os, time

def fault(image, digit):
    if digit == 1:
        raise ValueError("of my own")
    if digit == 2:
        os._exit(7)
    if digit == 3:
        time.sleep(3600)
    if digit == 4:
        return math.nan
    if digit == 5:
        raise SystemExit(2)
    if digit == 6:
        return "much"
    return float(image.mean()) + os.getpid() * 0

def brightest(images, prompt):
    best = images.mean((1, 2, 3)).max()
    return [float(image.mean() == best) for image in images]

def short(images):
    return [1.0]

def lost(images):
    if (images == 0).all((1, 2, 3)).any():
        os.abort()
    return images.mean((1, 2, 3))

def shapes(frames, metadata, source_images, prompt, limit=2):
    assert frames.shape == (5, 4, 6, 3) and metadata == {"digit": 4} and prompt == "a four"
    assert [each.shape for each in source_images] == [(2, 3, 1)]
    return frames[0, 0, 0, 2] * limit
"""
LEVELS = (10, 20, 30)
Made = Callable[..., WeightedScorer]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FAULTS)
    return path


@pytest.fixture
def made(file: Path) -> Iterator[Made]:
    built = []

    def make(function: str, **keys: Any) -> WeightedScorer:
        source = f"{file}:{function}"
        table = ScorerTable.model_validate({
            "name": "mine", "type": "python", "source": source, "patience": 20.0, **keys
        })  # fmt: skip
        [scorer] = build_scorers([table])
        built.append(scorer.scorer)
        return scorer

    yield make
    for scorer in built:
        assert isinstance(scorer, PythonScorer)
        scorer.close()


def bright(*levels: int) -> Any:
    return np.stack([np.full((3, 4, 4), level, np.uint8) for level in levels])


def scored(
    scorer: WeightedScorer, levels: tuple[int, ...], digits: tuple[int, ...]
) -> ScoringOutcome:
    metadata = [{"prompt": "a digit", "digit": digit} for digit in digits]
    return score_each(scorer, bright(*levels), metadata, may_all_fail=True)


def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(image): return 1.0", encoding="utf-8-sig")
    assert RewardFile.read(tmp_path / "mine.py").parameters.names == ("image",)


def test_each_fault_costs_its_own_sample_and_says_why(made: Made) -> None:
    levels, digits = (1, 2, 3, 4, 5, 6, 7, 8), (0, 1, 4, 5, 6, 2, 3, 0)
    found = scored(made("fault", patience=1.0), levels, digits)
    assert found.scores == (1.0, *6 * [None], 8.0)
    said = [found.reasons[sample] for sample in range(1, 7)]
    assert said[0] == "ValueError: of my own (mine.py, line 6)"
    assert "nan, which is no finite number" in said[1] and said[2].startswith("SystemExit: 2")
    assert "'much', which is no number" in said[3] and "ended with status 7" in said[4]
    assert said[5] == "a call took more than 1 s (patience)"


def test_after_three_lost_processes_the_rest_of_a_fragment_is_not_tried(made: Made) -> None:
    scorer = made("fault")
    found = scored(scorer, (1, 2, 3, 4, 5), (0, 2, 2, 2, 0))
    assert found.scores == (1.0, None, None, None, None)
    assert "was not tried: 3 calls before it" in found.reasons[4]
    assert scored(scorer, LEVELS, (0, 0, 0)).scores == LEVELS, "the next fragment is scored"


def test_a_group_is_scored_in_one_call(made: Made) -> None:
    scorer = made("brightest", scores="groups")
    metadata = [{"prompt": "a"}] * 3 + [{"prompt": "b"}] * 2
    found = score_each(scorer, bright(1, 5, 2, 7, 3), metadata)
    assert found.scores == (0.0, 1.0, 0.0, 1.0, 0.0)


def test_another_number_of_scores_fails_all_samples_of_the_call(made: Made) -> None:
    found = scored(made("short"), LEVELS, (0, 0, 0))
    assert found.scores == (None, None, None)
    assert set(found.reasons.values()) == {"it returned 1 scores for 3 samples"}


def test_a_call_of_many_that_ends_the_process_is_repeated_one_by_one(made: Made) -> None:
    found = scored(made("lost"), (9, 0, 7), (0, 0, 0))
    assert found.scores == (9.0, None, 7.0)
    assert found.reasons == {1: "its process was ended by SIGABRT"}


def test_a_video_its_prompt_and_source_images_are_passed_by_name(made: Made) -> None:
    videos = np.zeros((2, 5, 3, 4, 6), np.uint8)
    videos[:, :, 2] = 21
    given = {
        "prompt": "a four", "digit": 4, "source_images": (np.zeros((1, 2, 3), np.uint8),)
    }  # fmt: skip
    assert made("shapes").score(videos, [given] * 2) == [42.0, 42.0]
    images = score_each(made("shapes"), videos[:, 0], [given] * 2, may_all_fail=True)
    assert "scores videos, and these are images" in images.reasons[0]
    assert made("fault").score(videos, [{"digit": 0}] * 2) == [7.0, 7.0], "the mean of its frames"


def test_a_slow_import_costs_the_samples_that_come_before_it_is_done(
    tmp_path: Path, made: Made
) -> None:
    go, slow = tmp_path / "go", tmp_path / "slow.py"
    slow.write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n"
        "    time.sleep(0.02)\ndef score(image):\n    return 1\n"
    )
    scorer = made("score", source=f"{slow}:score", patience=0.1)
    found = scored(scorer, LEVELS, (0, 0, 0))
    assert set(found.reasons.values()) == {"the file was not imported within 0.1 s (patience)"}
    go.touch()
    slow.unlink()  # it is not read again
    for _ in range(100):
        if scored(scorer, LEVELS, (0, 0, 0)).scores == (1.0, 1.0, 1.0):
            return
    raise AssertionError("it was not imported")


def test_a_process_runs_the_text_that_was_read_at_the_start(file: Path, made: Made) -> None:
    scorer = made("fault")
    file.write_text(FAULTS.replace("image.mean()", "999"))
    found = scored(scorer, LEVELS, (0, 2, 0))
    assert found.scores == (10.0, None, 30.0), "the process was started anew in between"


BAD = {
    "nothing": "has no function 'nothing'; functions there: fault, brightest",
    "def score(imgs): ...": "asks for no samples; it has to ask for one of image",
    "def score(image, images): ...": "asks for image and images",
    "async def score(image): ...": "is async",
    "def score(*images): ...": "parameters without a name of their own",
    "def score(image:": "is not Python",
    "# /// script\n# dependencies = 3\n# ///\ndef score(image): ...": "a list of texts",
    "raise OSError('no weights')\ndef score(image): ...": "OSError: no weights (mine.py, line 1)",
}


@pytest.mark.parametrize("text", BAD)
def test_a_file_that_cannot_score_is_refused_in_one_line(file: Path, text: str, made: Made) -> None:
    if text != "nothing":
        file.write_text(text)
    with pytest.raises(UserError) as refused:
        made("nothing" if text == "nothing" else "score")
    said = str(refused.value)
    wanted = BAD[text].replace("fault, brightest", "brightest, fault")
    assert said.startswith("reward.scorers.mine.source: ") and "\n" not in said and wanted in said


def test_what_it_asks_for_has_to_be_in_the_metadata_of_every_prompt(file: Path) -> None:
    table = ScorerTable(name="mine", type="python", source=file, function="fault")
    check_prompts(table, [Prompt(text="a", metadata={"digit": 3})])
    with pytest.raises(UserError, match=r"asks for 'digit', which .* known are: image, .*colour"):
        check_prompts(table, [Prompt(text="a", metadata={"colour": "red"})])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"type": "python"}, "source: missing"),
        ({"type": "ocr", "source": "a.py"}, 'only a scorer of type "python"'),
        ({"type": "ocr", "scores": "groups"}, "scores each sample by itself"),
        ({"type": "python", "source": "a.py:1x"}, "match pattern"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ScorerTable.model_validate({"name": "x", **keys})


def test_a_function_of_one_sample_cannot_score_groups(file: Path) -> None:
    table = ScorerTable(name="x", type="python", source=file, function="fault", scores="groups")
    with pytest.raises(UserError, match=r"scores: .*fault takes one sample"):
        read_table(table)


def test_behind_a_server_faults_are_those_of_their_items(made: Made) -> None:
    client = TestClient(create_app(made("fault"), Health()))
    items = [
        {"id": str(n), "shape": [1, 1, 1], "data": b"\x09", "metadata": {"digit": digit}}
        for n, digit in enumerate((0, 1, 2, 0))
    ]
    body = msgpack.packb({"items": items})
    answer = client.post("/score", content=body, headers={"content-type": MSGPACK})
    results = msgpack.unpackb(answer.content)["results"]
    assert [each["score"] for each in results] == [9.0, None, None, 9.0]
    assert [each["error"] and each["error"]["type"] for each in results[1:3]] == [
        "scoring", "bad-item",
    ]  # fmt: skip


RETURNED = """
import msgpack
import numpy as np

def one(image):
    return np.array([0.5])

def many(images):
    return np.ones((len(images), 1))

def by_name(images):
    return {number: 1.0 for number in range(len(images))}

def single(images):
    return 0.5

def huge(image):
    return 10**400
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("one", "0.5 0.5"),
        ("many", "1.0 1.0"),
        ("by_name", "a dict; return a list with a number each"),
        ("single", "one float; return a list with a number each"),
        ("huge", "inf, which is no finite number"),
    ],
)
def test_arrays_of_one_number_are_numbers_and_other_things_say_what_is_missing(
    function: str, said: str, file: Path, made: Made
) -> None:
    file.write_text(RETURNED)
    found = scored(made(function), (10, 20), (0, 0))
    assert said in " ".join(map(str, [*found.scores, *found.reasons.values()]))


def test_a_file_that_imports_one_beside_it_is_told_to_hold_it_itself(
    file: Path, made: Made
) -> None:
    file.with_name("beside.py").write_text("")
    file.write_text("import beside\n\ndef score(image):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"named .beside. .*files beside it are not imported"):
        made("score")


def test_images_are_tried_as_a_run_would_see_them(tmp_path: Path) -> None:
    """Upright, of 8 bits, and source images at the size of the samples."""
    folder = tmp_path / "images"
    folder.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (8, 4)).save(folder / "a.jpg", exif=turned)
    Image.fromarray(np.full((8, 4), 256 * 99, np.uint16)).save(folder / "b.png")
    Image.new("RGB", (30, 60)).save(tmp_path / "source.png")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "image": "source.png"}')
    source = tmp_path / "mine.py"
    source.write_text(
        "def score(image, source_images):\n"
        "    assert image.shape[:2] == (8, 4), image.shape\n"
        "    assert source_images[0].shape == image.shape\n"
        "    return image.max()\n"
    )
    words = ["reward", "try", f"{source}:", "--images", str(folder), "--json"]
    tried = CliRunner().invoke(app, [*words, "--prompts", str(tmp_path / "p.jsonl")])
    found = json.loads(tried.stdout[tried.stdout.index("{\n") :])
    assert [each["score"] for each in found["scores"]] == [0.0, 99.0]
    words[2] = f"{source}:my-score"
    assert "is no name of a function" in str(CliRunner().invoke(app, words).exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("magic", r"TYPE: no scorer is called 'magic'; known are"),
        ("{file}:my-score", r"TYPE: 'my-score' is no name of a function"),
        ("{file}:fault --groups", r"--groups: .* takes one sample"),
        ("{file}:nothing", r"TYPE: .* has no function 'nothing'"),
        ("aesthetic", r"--folder: aesthetic needs the folder"),
        ("aesthetic --folder nowhere", r"--folder: no folder .*nowhere"),
    ],
)
def test_what_cannot_be_served_is_said_by_the_names_of_the_command(
    words: str, said: str, file: Path
) -> None:
    typed = words.format(file=file).split()
    tried = CliRunner().invoke(app, ["serve-scorer", *typed, "--port", "0"])
    assert isinstance(tried.exception, UserError)
    assert re.match(said, str(tried.exception)), tried.exception


def test_inline_metadata_name_an_environment() -> None:
    text = '# /// script\n# requires-python = ">=3.10"\n# dependencies = ["numpy<2", "x"]\n# ///\n'
    path = Path("made.py")
    found = RewardFile.parse(text + "def score(image): ...", path, "score")
    assert (found.dependencies, found.python, found.has_own_environment) == (
        ("numpy<2", "x"),
        ">=3.10",
        True,
    )


def test_trying_it_prints_scores_and_reasons(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for level in LEVELS:
        Image.new("RGB", (4, 4), (level, level, level)).save(folder / f"{level}.png")
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": "a digit", "metadata": {"digit": digit}} for digit in (0, 1, 0)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    words = ["reward", "try", f"{file}:fault", "--images", str(folder), "--prompts", str(prompts)]
    tried = CliRunner().invoke(app, [*words, "--json"])
    assert tried.exit_code == 1 and "1 of 3 samples have no score" in str(tried.exception)
    found = json.loads(tried.stdout[tried.stdout.index("{\n") :])
    assert [each["score"] for each in found["scores"]] == [10.0, None, 30.0]
    assert found["mean"] == 20.0 and found["parameters"] == ["image", "digit"]
    shown = CliRunner().invoke(app, words).stdout
    assert "20.png  no score: ValueError: of my own (mine.py, line 6)" in shown


@pytest.mark.parametrize("text", ["a red fox", "a red fox " * 40])
def test_a_prompt_in_place_of_a_file_with_prompts_is_refused(
    text: str, file: Path, tmp_path: Path
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "black.png")
    words = ["reward", "try", f"{file}:fault", "--images", str(tmp_path), "--prompts", text]
    tried = CliRunner().invoke(app, words)
    assert isinstance(tried.exception, UserError)
    assert str(tried.exception).startswith(f"--prompts: no file {text}; name a file with")
