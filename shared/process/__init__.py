"""What every service process is made of: settings, health, HTTP, and a worker's life."""
