"""A figure of the page needs two product files, as CONTRIBUTING says: reading and template."""

from digenrl.reading.reading import RunReading, read
from digenrl.view.markup import templates
from tests.readings import facts, step


class RicherReading(RunReading):
    """A reading with one figure more."""

    loss: float | None
    """Loss of the newest step."""


def test_a_figure_is_a_field_of_the_reading_and_a_line_of_a_template() -> None:
    known = read(facts(steps=[step(4, 4, loss=-2.0)]))
    found = RicherReading(**known.model_dump(), loss=known.metrics.get("loss"))
    line = "{% if reading.loss is not none %}<dd>{{ reading.loss|figure }}</dd>{% endif %}"
    assert templates().from_string(line).render(reading=found) == "<dd>-2</dd>"
    described = RunReading.model_json_schema()["properties"]
    assert all("description" in each for name, each in described.items() if name != "load")
