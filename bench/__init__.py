"""Benchmarks: `python -m bench NAME`. They report figures; goals and readings are in docs/performance.md."""
