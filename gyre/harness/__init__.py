"""Harnesses: the unmodified agent programs that run inside a sandbox, one file each. No torch."""
