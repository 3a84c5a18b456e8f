from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from farandole.core import log

SCRIPT = """
import logging, sys
{setup}
from farandole.core import log
log.configure("{level}")
log.configure("{level}")
logger = logging.getLogger("farandole.somewhere")
logger.info("information")
logger.error("trouble")
"""


def said(level: str, setup: str = "") -> str:
    code = SCRIPT.format(level=level, setup=setup)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_messages_from_the_level_up_are_shown_once_on_stderr() -> None:
    assert said("warning") == "farandole: ERROR: trouble\n"
    assert said("info") == "farandole: INFO: information\nfarandole: ERROR: trouble\n"


def test_a_script_that_sets_up_logging_keeps_its_format() -> None:
    setup = "logging.basicConfig(format='mine: %(message)s')"
    assert said("warning", setup) == "mine: trouble\n"


@pytest.mark.parametrize("name", ["debug", "info", "warning", "error", "critical"])
def test_levels_are_pythons(name: str) -> None:
    assert log.LEVELS[name] == getattr(logging, name.upper())
