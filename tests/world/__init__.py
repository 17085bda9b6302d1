"""The real services of a run in one process and in virtual time, from one seed.

python -m tests.world SEED
"""
