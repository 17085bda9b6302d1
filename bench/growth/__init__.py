"""How the scheduler's work grows with devices and steps; nothing here is scaled or emulated but the
devices."""
