"""The table of a recipe that says how the server of a remote scorer is asked."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.recipe.table import Positive, Table


class Remote(Table):
    format: Literal["msgpack", "json"] = "msgpack"
    """Of requests and answers. json: pixels in base64, a third more of them."""
    batch: Annotated[Positive, Field(le=1024)] = 32
    """Samples of a request, at most."""
    key_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable that holds the API key, which is sent as a bearer token.
    Without it and ``key_file``, none is sent."""
    key_file: Path | None = None
    """File that holds the API key and nothing else; relative to the recipe."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("key_file: give key_env or key_file, not both")
        return self
