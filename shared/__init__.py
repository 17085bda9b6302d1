"""What the services agree on: messages, bus, object store, versions. Knows no service."""
