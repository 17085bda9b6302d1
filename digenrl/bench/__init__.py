"""`digenrl bench`: what the devices, and the methods, really cost."""
