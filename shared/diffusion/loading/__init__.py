"""Models, networks and the device that holds them."""
