"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import settings

# No example database: tests write nothing outside tmp_path. No deadline: two busy cores are slow.
settings.register_profile("paralign", database=None, deadline=None)
settings.load_profile("paralign")
