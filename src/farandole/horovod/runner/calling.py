"""``horovod.run``: call a function on every rank of a job and collect what it returns.

The job runs in a process of its own (:mod:`~farandole.horovod.runner.job_process`), which ends with
this one whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]

from farandole.core.errors import FarandoleBug, JobFailed, SetupError, UsageError
from farandole.horovod.runner.common.util import config_parser
from farandole.horovod.runner.options import Arguments

_CALLEE = "farandole.horovod.runner.callee"
_PROCESS = "farandole.horovod.runner.job_process"
_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job "
    "to be terminated."
)
"""Programs match on this text."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks and return the results, by rank.

    Function, arguments and results are pickled (cloudpickle: lambdas and functions of notebooks
    too). ``hosts`` is ``"node1:4,node2:4"``, or ``hostfile`` names a file; default: this machine.
    The other parameters are ``horovodrun``'s options; those that have no effect say so on standard
    error. ``np``, ``min_np``, ``max_np`` and ``network_interface`` are old names.

    Raises ``JobFailed`` (a ``RuntimeError``) with the rank and its traceback when a rank fails; the
    others are ended. ``UsageError`` (a ``ValueError``) when the arguments contradict each other.

    Example::

        def train(epochs):
            hvd.init()
            ...
            return hvd.rank()

        horovod.run(train, args=(3,), num_proc=2)   # [0, 1]
    """
    if use_gloo and use_mpi:
        raise UsageError("Argument use_gloo and use_mpi only allow one set True.")
    nics = list(network_interfaces or ())
    if network_interface is not None:
        _warn_old("network_interface", "network_interfaces")
        nics = network_interface.split(",")
    arguments = Arguments(
        num_proc=_renamed(np, "np", "num_proc", num_proc),
        min_num_proc=_renamed(min_np, "min_np", "min_num_proc", min_num_proc),
        max_num_proc=_renamed(max_np, "max_np", "max_num_proc", max_num_proc),
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        disable_cache=disable_cache,
        output_filename=output_filename,
        verbose=verbose,
        use_gloo=use_gloo,
        use_mpi=use_mpi,
        mpi_args=mpi_args,
        nics=set(nics) or None,
        executable=executable,
        run_func=lambda: func(*args, **(kwargs or {})),
    )
    results = run_job(arguments)
    assert results is not None
    return results


def run_job(arguments: Arguments) -> list[Any] | None:
    """Run what ``arguments`` ask for: the results of their function, or ``None`` for a command.

    Raises as :func:`run` does.
    """
    config_parser.validate_config_args(arguments)
    function = arguments.run_func
    pickled = b"" if function is None else cloudpickle.dumps(function)
    python = arguments.executable or sys.executable
    wish = {
        "arguments": {
            **vars(arguments),
            "nics": sorted(arguments.nics or ()),
            "command": arguments.command if function is None else [python, "-m", _CALLEE],
            "run_func": None,
        },
        # An entry that means "here" means another folder there, if the function goes elsewhere.
        "path": [os.path.abspath(entry) for entry in sys.path],
    }
    outcome, payload = _in_process(python, json.dumps(wish).encode() + b"\n" + pickled)
    if "error" in outcome:
        raise (UsageError if outcome["usage"] else SetupError)(outcome["error"])
    if outcome["code"] != 0:
        raise _failure(outcome["code"], outcome["failure"], outcome["why"])
    return None if function is None else _unpack(outcome["sizes"], payload)


def _in_process(python: str, wish: bytes) -> tuple[dict[str, Any], bytes]:
    """Have a process run the job, and return what it says in the end."""
    with contextlib.ExitStack() as open_files:
        their_input, our_output = _pipe(open_files)
        our_input, their_output = _pipe(open_files)
        process, readers = _start(python, [their_input, their_output])
        their_input.close()
        their_output.close()
        try:
            with contextlib.suppress(BrokenPipeError), our_output:
                our_output.write(wish)
            said, payload = our_input.readline(), our_input.read()
            process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        finally:
            for reader in readers:
                reader.join()
    if not said:
        raise FarandoleBug(f"The job's process ended with {process.returncode} and said nothing.")
    outcome: dict[str, Any] = json.loads(said)
    return outcome, payload


def _pipe(open_files: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return (
        open_files.enter_context(open(reading, "rb")),
        open_files.enter_context(open(writing, "wb")),
    )


def _start(
    python: str, ends: Sequence[IO[bytes]]
) -> tuple[subprocess.Popen[bytes], list[threading.Thread]]:
    """Start the process; its output goes where this program's goes, by threads if need be."""
    descriptors = [end.fileno() for end in ends]
    words = [python, "-m", _PROCESS, *map(str, descriptors), str(os.getpid())]
    try:
        process = subprocess.Popen(
            words,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=_for_child(sys.stdout, 1),
            stderr=_for_child(sys.stderr, 2),
            # Ctrl-C reaches this process, which passes it on once.
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"{python} cannot be started: {error.strerror}.") from None
    pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    return process, [_passing_on(pipe, target) for pipe, target in pipes if pipe is not None]


def _for_child(stream: Any, number: int) -> int | None:
    """A pipe where this stream is not the process's own, as in a notebook."""
    try:
        return None if stream.fileno() == number else subprocess.PIPE
    except (OSError, ValueError, AttributeError):
        return subprocess.PIPE


def _passing_on(pipe: IO[bytes], target: Any) -> threading.Thread:
    def pass_on() -> None:
        with pipe:
            for line in pipe:
                target.write(line.decode("utf-8", "replace"))
                target.flush()

    thread = threading.Thread(target=pass_on, name="farandole-output", daemon=True)
    thread.start()
    return thread


def _failure(code: int, failure: dict[str, Any] | None, why: str | None) -> JobFailed:
    if failure is None:
        also = f" {why}" if why else ""
        return JobFailed(
            f"{_FAILED}{also} The job's exit code is {code}; what failed is shown above."
        )
    rank = failure["rank"]
    return JobFailed(
        f"{_FAILED} The first was rank {rank}:\n{failure['traceback'].rstrip()}", ranks=[rank]
    )


def _unpack(sizes: Sequence[int | None], payload: bytes) -> list[Any]:
    silent = [rank for rank, size in enumerate(sizes) if size is None]
    if silent:
        raise JobFailed(
            f"Rank {silent[0]} ended before the function had returned, by sys.exit() for example.",
            ranks=silent,
        )
    results = []
    at = 0
    for size in sizes:
        end = at + (size or 0)
        results.append(cloudpickle.loads(payload[at:end]))
        at = end
    return results


def _renamed(old: int | None, name: str, new: str, value: int | None) -> int | None:
    if old is None:
        return value
    _warn_old(name, new)
    return old


def _warn_old(name: str, new: str) -> None:
    warnings.warn(f"{name} is deprecated, use {new} instead", DeprecationWarning, stacklevel=4)
