"""The simulator on one split of devices, beside the models of colocated systems."""
