"""Horovod's texts for elastic jobs. Programs match on them."""

from __future__ import annotations

from farandole.elastic.decisions import RESET_LIMIT_EXCEEDED as RESET_LIMIT_EXCEEDED_MESSAGE

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]
