"""The scheduler as a pure machine: events in, commands out. No clock, no randomness, no I/O."""
