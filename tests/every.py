"""Whether tests run every case, and all that they draw: ``make test EVERY=1``."""

import os

EVERY = bool(os.environ.get("EVERY"))
