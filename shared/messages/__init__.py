"""What goes over the wire: messages, their bytes, their places, and which may be too old."""
