"""What `digenrl up` starts and shows while a run goes on."""
