"""One file per kind of scorer."""
