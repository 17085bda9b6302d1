"""Fluid devices: every device that can train is a member and takes any available work."""
