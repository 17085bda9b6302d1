"""What both studies have in common: brokers, runs that are watched, rounds, figures and pictures.

session.py   brokers that serve every run       watch.py    one run, as it is heard of
figures.py   its measured batches in figures    rounds.py   modes by turns
placement.py which process runs on which core   plots.py    pictures
"""
