"""The streams on NATS JetStream: publishing, consuming, and stopping in good order."""
