"""What a run does, did and needs, computed once: page, API, command line and report render it."""
