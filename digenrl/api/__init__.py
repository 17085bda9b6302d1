"""The HTTP API as a whole: its description, and the routes served outside of the scheduler."""
