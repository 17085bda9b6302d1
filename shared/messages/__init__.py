"""The wire format: messages, their bytes, their subjects, and which may be too old."""
