"""Contents of a run in object storage and Redis: commit records, files, versions, retention."""
