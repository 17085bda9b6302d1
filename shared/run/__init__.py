"""What a run leaves in object storage and Redis: commit records, files, versions, retention."""
