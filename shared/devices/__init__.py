"""States what services ask of a device, how a group is sliced for several, how one is lent."""
