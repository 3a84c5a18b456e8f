"""Horovod's names, for programs that say ``import horovod``. They lead to Farandole.

Example::

    import horovod
    horovod.run(train, num_proc=2)        # the results of train(), by rank
"""

from __future__ import annotations

from typing import Any

__version__ = "0.28.1"
"""The Horovod whose interface this is: programs compare it. Farandole's own is in its package."""

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    # Workers say `import horovod.torch` and have no use for a launcher.
    if name == "run":
        from farandole.horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
