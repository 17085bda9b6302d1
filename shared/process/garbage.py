"""Python's garbage collector, in processes that run for long."""

import gc


def keep_what_is_there() -> None:
    """Modules and models stay until the end; to look through them for garbage stops a service for
    50 ms every now and then."""
    gc.collect()
    gc.freeze()
