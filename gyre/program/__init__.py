"""Composition: the processes of a run and how they are wired. Imported by gyre.py alone."""
