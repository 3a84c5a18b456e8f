"""Horovod's elastic states and loop, which do not depend on a framework."""

from __future__ import annotations

from farandole.elastic.run import run as run_fn
from farandole.elastic.state import HostUpdateResult, ObjectState, State

__all__ = ["HostUpdateResult", "ObjectState", "State", "run_fn"]
