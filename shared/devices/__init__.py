"""What services ask of a device, how a group is cut for several, and how a device is lent."""
