"""Name the causes of a failed comparison where the numbers prove them (``docs/causes.md``)."""

from paralign.align.explain.candidates import names_cause as names_cause
from paralign.align.explain.candidates import names_place as names_place
from paralign.align.explain.context import Context as Context
from paralign.align.explain.order import explain as explain
