"""``python -m paralign``: the same as the ``paralign`` command."""

import sys

from paralign.cli import main

if __name__ == "__main__":
    sys.exit(main())
