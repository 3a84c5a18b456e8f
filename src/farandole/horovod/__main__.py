"""``python -m farandole.horovod script.py arguments…``: a program in which Horovod is Farandole.

For starting ranks by something else than Farandole's launcher, and for a single process. What
follows is what ``python`` takes: a script, ``-m module``, ``-c code``. Example::

    mpirun -np 4 python -m farandole.horovod train.py --epochs 3
"""

from __future__ import annotations

import os
import sys

from farandole.core.config import environment as current_environment
from farandole.launch import early, environment


def main() -> None:
    """Become a Python that runs the program that the arguments name."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__.partition("\n\n")[0].replace("``", "") if __doc__ else None)
    environ = {**environment.with_names(current_environment()), "FARANDOLE_HOROVOD": "1"}
    argv = [sys.executable, *early.interpreter_flags(), *arguments]
    os.execve(sys.executable, argv, environ)


if __name__ == "__main__":
    main()
