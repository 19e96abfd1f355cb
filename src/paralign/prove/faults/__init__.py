"""Faults that parallel training is known to have, a family a file; see ``docs/drill.md``."""
