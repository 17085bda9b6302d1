"""Keeps collections of garbage short, which stop all threads of the process."""

import gc


def settle_heap() -> None:
    """Leave all objects that there are out of later collections.

    Modules, classes and validators live as long as the process, and are two thirds of what a
    collection would look at even with thousands of devices.
    """
    gc.collect()
    gc.freeze()
