"""Run the command line: ``python -m gpudist``."""

import sys

from gpudist.cli import main

if __name__ == "__main__":
    sys.exit(main())
