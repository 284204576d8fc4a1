"""Python's garbage collector, kept out of the way of processes that leave it next to nothing to find."""

from __future__ import annotations

import gc


def spare_collector() -> None:
    """Set aside what imports have left, and look at the rest less often. Call it when all is imported.

    What is given up by the last who holds it is freed at once, as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)
