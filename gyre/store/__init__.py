"""The run store: append-only logs that survive a kill, an index that can be rebuilt, a summary recomputed from both."""
