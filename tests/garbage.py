"""Makes searches for garbage rare in the process that imports this, and in its forks.

Most objects of a test end with their last reference. With Python's own thresholds a tenth of the
suite's time goes into searches among those that do not.
"""

import gc

gc.set_threshold(50_000, 20, 10)
