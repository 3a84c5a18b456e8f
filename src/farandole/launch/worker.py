"""What a new process does to become a worker, until the user's program has it for itself.

A worker that was forked with torch imported must not differ from a fresh ``python script.py``. What
Python's start-up does for a program is done here again for the forked one: standard streams,
``__main__``, ``sys.argv``, ``sys.path[0]``, tracebacks without frames of ours; and what a fork
copies but a start would draw anew (random seeds, multiprocessing's key) is drawn anew.

Two differences remain, on purpose: standard output is written line by line also into a pipe, so
that the launcher shows lines when they are printed, and ``hash()`` of strings agrees on all ranks.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import Any, TextIO

from farandole.core.errors import PeerLost, ShutDownError
from farandole.launch import kernel

_OUT_OF_THE_WAY = 100
"""The lowest number for a descriptor of ours in a worker: programs expect their first to be 3."""

_OUR_FILES = frozenset([__file__, os.path.join(os.path.dirname(__file__), "prefork.py")])


def settle(streams: Sequence[int], parent: int) -> None:
    """Take standard input, output and error, an own session, and the bond to the agent."""
    os.setsid()
    kernel.die_with(parent)
    # Twice, so that no stream is overwritten before it is in its place.
    safe = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for stream in streams]
    for number, stream in enumerate(safe):
        os.dup2(stream, number)
        os.close(stream)


def execute(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replace this process by a command; raises ``OSError`` when that cannot be done."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(argv[0], list(argv), dict(environ))


def out_of_the_way(descriptor: int) -> int:
    """Move a descriptor of ours to a high number; it is closed by ``exec``."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    os.close(descriptor)
    return moved


def replace_environment(environ: Mapping[str, str]) -> None:
    """Make the environment of this process exactly ``environ``."""
    for name in [name for name in os.environ if name not in environ]:
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def open_standard_streams() -> None:
    """Make ``sys.stdin``, ``stdout`` and ``stderr`` of this process's descriptors, as Python does.

    Standard output is line-buffered here even where it is no terminal.
    """
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    stdin = _text(0, "<stdin>", "r", sys.__stdin__)
    stdout = _text(1, "<stdout>", "w", sys.__stdout__, unbuffered=unbuffered, by_line=True)
    stderr = _text(2, "<stderr>", "w", sys.__stderr__, unbuffered=unbuffered, by_line=True)
    # The fields are final for a type checker only.
    vars(sys).update(
        stdin=stdin, stdout=stdout, stderr=stderr,
        __stdin__=stdin, __stdout__=stdout, __stderr__=stderr,
    )  # fmt: skip


def run_script(path: str, arguments: Sequence[str], report: int) -> None:
    """Run a source file as ``python path arguments…`` would; returns where Python would end."""
    sys.argv = [path, *arguments]
    _set_original_arguments([path, *arguments])
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    main = _fresh_main()
    main.__file__ = absolute
    vars(main)["__cached__"] = None
    vars(main)["__loader__"] = SourceFileLoader("__main__", absolute)

    def run() -> None:
        with io.open_code(absolute) as file:
            source = file.read()
        exec(compile(source, absolute, "exec", dont_inherit=True), vars(main))

    _run(run, report)


def run_module(name: str, arguments: Sequence[str], report: int) -> None:
    """Run a module as ``python -m name arguments…`` would."""
    sys.argv = ["-m", *arguments]
    _set_original_arguments(["-m", name, *arguments])
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    _fresh_main()
    _run(lambda: vars(runpy)["_run_module_as_main"](name), report)


def _run(program: Any, report: int) -> None:
    """Call the program; an exception ends this process as Python ends on it.

    The traceback that the user sees begins at the user's first frame.
    """
    worker = os.getpid()
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, Python's own ending follows
        shown = _without_our_frames(error.__traceback__)
        error.__traceback__ = shown
        if os.getpid() == worker:  # else it is the end of a process that the program has forked
            _send_report(error, report)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, shown)
        sys.excepthook = _already_shown
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt from None  # Python then ends by SIGINT
        sys.exit(1)


def _already_shown(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Print nothing: the exception that ends the process has been shown."""


def _without_our_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FILES:
        frames = frames.tb_next
    return frames


def _send_report(error: BaseException, descriptor: int) -> None:
    """Tell the agent why this worker ends, at the moment it happens, not when Python has ended.

    A pipe takes all of it at once, also where each character becomes the twelve bytes of JSON's
    longest escape.
    """
    text = "".join(traceback.format_exception(error))
    payload = {
        "exception": type(error).__qualname__,
        "text": str(error)[:1000],
        "traceback": text[-4000:],
        "victim": isinstance(error, (PeerLost, ShutDownError)),
    }
    try:
        os.write(descriptor, json.dumps(payload).encode("ascii"))
    except OSError:
        # The agent is gone, and this process dies with it.
        return


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    return main


def _set_original_arguments(arguments: Sequence[str]) -> None:
    vars(sys)["orig_argv"] = [sys.executable, *arguments]


def _text(
    descriptor: int,
    name: str,
    mode: str,
    like: TextIO | None,
    *,
    unbuffered: bool = False,
    by_line: bool = False,
) -> TextIO:
    raw: Any = open(descriptor, mode + "b", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    inner = raw if unbuffered else raw.raw
    inner.name = name
    errors = {"<stderr>": "backslashreplace"}.get(name, getattr(like, "errors", "strict"))
    stream = io.TextIOWrapper(
        raw,
        encoding=getattr(like, "encoding", None),
        errors=errors,
        newline="\n",
        line_buffering=by_line and not unbuffered,
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream
