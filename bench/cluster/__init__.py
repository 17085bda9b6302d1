"""`python -m bench cluster`: the real services, brokers, objects over devices that are emulated.

A device is emulated by holding it for the time that a cost profile says, divided by a scale; bytes
are divided by the same scale, so that bandwidth and overlap keep their proportions. Messages are
not scaled: there are `scale` times as many of them per second as there would be in the real run.
"""
