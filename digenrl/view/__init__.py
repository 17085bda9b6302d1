"""The run's page: what a run does and has done, for people, in a browser."""
