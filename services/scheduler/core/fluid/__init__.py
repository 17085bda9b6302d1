"""Fluid devices: every device that can train is a member, and takes whatever work there is."""
