"""Says as JSON what a program can see of how it was started."""

import json
import os
import signal
import sys
import threading

import __main__

seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "main": {
        name: str(value)
        for name, value in vars(__main__).items()
        if name.startswith("__") and name not in ("__builtins__", "__loader__", "__doc__")
    },
    "doc": __doc__,
    "builtins": str(type(__builtins__)),
    "loader": type(__loader__).__name__,
    "loader path": getattr(__loader__, "path", None),
    "cwd": os.getcwd(),
    "umask": os.umask(0o22),
    "environ": {k: v for k, v in os.environ.items() if k != "_"},
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "thread": threading.current_thread().name,
    "main thread": threading.current_thread() is threading.main_thread(),
    "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.newlines, sys.stdout.name,
               sys.stdout.mode, sys.stdout.fileno(), sys.stdout.isatty(),
               type(sys.stdout.buffer).__name__, type(sys.stdout.buffer).__name__,
               sys.stdout is sys.__stdout__],
    "stderr": [sys.stderr.encoding, sys.stderr.errors, sys.stderr.name, sys.stderr.mode,
               sys.stderr.line_buffering, sys.stderr.fileno(), sys.stderr.write_through],
    "stdin": [sys.stdin.encoding, sys.stdin.errors, sys.stdin.name, sys.stdin.mode,
              sys.stdin.fileno(), sys.stdin.line_buffering],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
              sys.gettrace(), sys.getprofile()],
    "executable": [sys.executable, sys.prefix],
    "last": hasattr(sys, "last_value"),
    "said": sys.stdin.read(),
}  # fmt: skip

import gc  # noqa: E402
import warnings  # noqa: E402

import torch  # noqa: E402

seen["gc"] = [gc.isenabled(), gc.get_threshold()]
seen["warnings"] = [str(f) for f in warnings.filters]
seen["torch threads"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
from threadpoolctl import threadpool_info  # noqa: E402

seen["pools"] = sorted(
    (p["internal_api"], p["num_threads"], os.path.basename(p["filepath"]))
    for p in threadpool_info()
)
print(json.dumps(seen))
