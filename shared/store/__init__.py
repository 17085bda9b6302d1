"""Objects by key: tensors, media, weights, checkpoints and the commit records.

Two backends, chosen by URL: ``file:///folder`` for one host; ``s3://bucket/prefix``, ``gs://`` or
``az://`` for many.
"""

from shared.store.objects import ObjectStore, open_store
from shared.store.settings import CacheSettings, StoreSettings

__all__ = ["CacheSettings", "ObjectStore", "StoreSettings", "open_store"]
