"""A data set that prompts are taken from: one of the Hugging Face hub, or files of this host."""

import hashlib
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from shared.learning.dataset_rows import Columns
from shared.learning.hub_datasets import LOCAL_DATASET, PREFIX, PROMPTS_FILE
from shared.learning.own_files import converted_digest
from shared.models.hub import ID_PATTERN, MAIN, REVISION_PATTERN, commit_at, storage, target
from shared.recipe.fields import Table

Name = Annotated[str, Field(min_length=1, max_length=200)]
CONVERSION_VERSION = "2"
"""Version of how prompts are made of rows: part of the name of what was made."""


class Dataset(Table):
    id: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    """Name of a data set on the Hugging Face hub, such as `org/name`. `digenrl fetch` downloads
    it."""
    folder: Path | None = None
    """Folder or file of this host, in place of `id`; relative to the recipe."""
    revision: Annotated[str, Field(pattern=REVISION_PATTERN)] | None = None
    """Branch, tag or commit; default: main. A run records the commit, or the digest of prompts that
    were made from files of this host."""
    config: Name | None = None
    """Configuration (subset) of the data set; default: the one that the data set names."""
    split: Name = "train"
    """Split of the data set."""
    prompt: Name = "prompt"
    """Column of the prompts."""
    image: Name | None = None
    """Column of the source images: images, or paths of files."""
    metadata: tuple[Name, ...] | None = None
    """Columns that scorers receive as metadata. Default: all other columns of texts, numbers or
    booleans."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if (self.id is None) == (self.folder is None):
            raise ValueError(
                "id: give id, the name of a data set on the hub, or folder, files of this host"
            )
        return self

    @property
    def columns(self) -> Columns:
        return Columns(self.prompt, self.image, self.metadata)

    @property
    def storage(self) -> Path:
        """The folder of the data set on this host; for files of this host, the folder of the
        prompts made of them."""
        return target() / LOCAL_DATASET if self.id is None else storage(target(), self.id, PREFIX)

    @property
    def commit(self) -> str | None:
        """The commit that the revision was at when it was fetched; of files of this host, the
        digest of the prompts that were made of them as they are now. None without any."""
        if self.folder is not None:
            named = self.revision or converted_digest(self.storage, self.folder, self.selection)
        else:
            revision = self.revision or MAIN
            named = commit_at(self.storage, revision) or revision
        return named if named is not None and self.file(named).is_file() else None

    @property
    def selection(self) -> str:
        """A name for what is taken of the files."""
        made_by = (CONVERSION_VERSION, self.config, self.split, self.columns)
        return hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]

    def file(self, commit: str) -> Path:
        """Return where the prompts that are made of a commit are."""
        return self.storage / "prompts" / commit / self.selection / PROMPTS_FILE

    @property
    def prompts(self) -> Path:
        """Where the prompts are on this host, or would be."""
        return self.file(self.commit or self.revision or MAIN)

    def located(self, base: Path) -> Self:
        """Return the table with the folder that it means on this host, relative to ``base``, and
        with the commit of what is on this host."""
        here = self.absolute(base, "folder")
        return here.model_copy(update={"revision": here.commit or here.revision})
