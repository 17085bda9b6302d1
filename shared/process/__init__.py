"""Makes a service process: settings, health, HTTP, and a worker's life."""
