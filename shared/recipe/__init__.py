"""The recipe of a run: its tables, what goes with what, and what is wrong with one in a line."""
