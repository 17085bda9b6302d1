"""State, history and needs of a run, computed once: page, API, command line and report render
it."""
