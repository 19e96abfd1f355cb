"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

from paralign.launch import patient_threads

os.environ.update(patient_threads())  # before a test imports torch

# No example database: tests write nothing outside tmp_path. No deadline: two busy cores are slow.
settings.register_profile("paralign", database=None, deadline=None)
settings.load_profile("paralign")
