"""The evaluator's HTTP side, as it describes itself and as it answers."""

from fastapi.testclient import TestClient

from digenrl.evaluation.progress import Progress, routes
from shared.process.service import Health, worker_app


def test_the_evaluator_describes_every_field_and_answers_as_its_example() -> None:
    progress = Progress()
    app = worker_app("evaluation", Health())
    app.include_router(routes(progress))
    schemas = app.openapi()["components"]["schemas"]
    assert {"Progress", "ProbeView", "Problem"} == set(schemas)
    for name, model in schemas.items():
        assert all(field.get("description") for field in model["properties"].values()), name
    [example] = Progress.model_json_schema()["examples"]
    progress.evaluated, progress.pending = example["evaluated"], example["pending"]
    assert TestClient(app).get("/v1/evaluation").json() == example
