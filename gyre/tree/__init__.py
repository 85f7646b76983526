"""Trajectory trees: what one rollout's model calls were, token by token, and which of them are trained.

Pure: standard library and numpy; no clock, no I/O, no randomness of its own (seeds are arguments).
"""
