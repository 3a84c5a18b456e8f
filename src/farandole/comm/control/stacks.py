"""A rank's answer to "where are you?": the Python stacks of the user's threads."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[2]) + "/"
"""The folder of our own modules: their frames say nothing to whoever looks for a lost rank."""

SHOWN_FRAMES = 16


def describe(threads: Iterable[threading.Thread]) -> str:
    """The stacks of those ``threads`` that live, innermost call last, without our own frames.

    Never blocks and never raises for a thread that ends meanwhile: fit for any thread to call.
    """
    frames = sys._current_frames()
    texts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            stack = _of_the_user(traceback.extract_stack(frame))
            texts.append(f"  thread {thread.name}:\n" + "".join(traceback.format_list(stack)))
    return "".join(texts).rstrip() or "  no thread of it runs Python code"


def _of_the_user(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    first, last = 0, len(stack)
    while first < last and stack[last - 1].filename.startswith(PACKAGE):
        last -= 1
    while first < last and stack[first].filename.startswith(PACKAGE):
        first += 1
    users = stack[first:last] or stack
    return users[-SHOWN_FRAMES:]
