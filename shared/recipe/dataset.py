"""A data set of the Hugging Face hub that prompts are taken from."""

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shared.learning.dataset_rows import Columns
from shared.learning.hub_datasets import PREFIX, PROMPTS_FILE
from shared.models.hub import ID_PATTERN, MAIN, REVISION_PATTERN, commit_at, storage, target
from shared.recipe.fields import Table

Name = Annotated[str, Field(min_length=1, max_length=200)]
MAKING = "1"
"""Version of how prompts are made of rows: part of the name of what was made."""


class Dataset(Table):
    id: Annotated[str, Field(pattern=ID_PATTERN)]
    """Name of a data set on the Hugging Face hub; `digenrl fetch` brings it."""
    revision: Annotated[str, Field(pattern=REVISION_PATTERN)] | None = None
    """Branch, tag or commit, by default main; once the prompts are here, the commit."""
    config: Name | None = None
    """Configuration (subset), by default the one that the data set names."""
    split: Name = "train"
    prompt: Name = "prompt"
    """Column that holds the prompts."""
    image: Name | None = None
    """Column that holds the source images of models that edit them: images, or their paths."""
    metadata: tuple[Name, ...] | None = None
    """Columns that rewards receive; without it, all others of texts, numbers or bools."""

    @property
    def columns(self) -> Columns:
        return Columns(self.prompt, self.image, self.metadata)

    @property
    def storage(self) -> Path:
        """The folder of the data set on this host."""
        return storage(target(), self.id, PREFIX)

    @property
    def commit(self) -> str | None:
        """The commit that the revision was at when it was fetched; None if it was not."""
        revision = self.revision or MAIN
        named = commit_at(self.storage, revision) or revision
        return named if self.file(named).is_file() else None

    def file(self, commit: str) -> Path:
        """Return where the prompts that are made of a commit are."""
        made_by = (MAKING, self.config, self.split, self.columns)
        selection = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
        return self.storage / "prompts" / commit / selection / PROMPTS_FILE

    @property
    def prompts(self) -> Path:
        """Where the prompts are on this host, or would be."""
        return self.file(self.commit or self.revision or MAIN)

    def pinned(self) -> "Dataset":
        """Return the table with the commit of what is on this host."""
        return self.model_copy(update={"revision": self.commit or self.revision})
