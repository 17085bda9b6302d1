"""Hosts that take part in one run: each by `digenrl host`, or all as units over ssh."""
