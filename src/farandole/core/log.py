"""Our log: the standard library's, under the logger ``farandole``."""

from __future__ import annotations

import logging

LEVELS: dict[str, int] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "critical": logging.CRITICAL,
}
"""The names that settings accept: Python's, and Horovod's ``trace`` and ``fatal``."""


def configure(level: str) -> None:
    """Let messages from ``level`` up pass, and show them on stderr if nobody else shows them.

    A script that has set up :mod:`logging` itself, for the root or for ``farandole``, keeps its
    handlers and formats.
    """
    logger = logging.getLogger("farandole")
    logger.setLevel(LEVELS[level])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("farandole: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
