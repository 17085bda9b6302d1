"""TAG: how many groups of a batch the trainer generates. Pure: time enters as data."""
