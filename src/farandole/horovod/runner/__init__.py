"""Starting jobs under Horovod's names: ``horovod.run`` and ``horovodrun``.

Example::

    from horovod.runner import run

    run(train, args=(3,), num_proc=2)     # the results of train(3), by rank
"""

from __future__ import annotations

from farandole.horovod.runner.calling import run
from farandole.horovod.runner.options import Arguments as _HorovodArgs

__all__ = ["_HorovodArgs", "run"]
