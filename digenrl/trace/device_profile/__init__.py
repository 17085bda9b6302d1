"""`digenrl profile`: what one model costs on this device, measured with random weights."""
