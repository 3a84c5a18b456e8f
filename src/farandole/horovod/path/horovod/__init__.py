"""What ``import horovod`` finds in a job of Farandole's.

The launcher adds this folder's parent to ``PYTHONPATH``, so that a worker, however it was started,
and its children find it. A Horovod that is installed is found later on the path than this: it is
looked for here and wins, unless ``FARANDOLE_HOROVOD=1`` asks for Farandole.

Only the standard library may be imported before it is clear that Farandole is meant: a child may
be a Python of another environment.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder


def _installed() -> ModuleSpec | None:
    here = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir))
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry) != here]
    spec = PathFinder.find_spec(__name__, elsewhere)
    folders = spec.submodule_search_locations if spec is not None else None
    # Farandole's own distribution of that name has nothing but a file like this one.
    real = any(os.path.isdir(os.path.join(folder, "common")) for folder in folders or ())
    return spec if real else None


def _become(spec: ModuleSpec) -> None:
    if os.environ.get("FARANDOLE_RANK", "0") == "0":
        logging.getLogger("farandole").warning(
            "farandole: `import horovod` gets the Horovod that is installed here (%s). For "
            "Farandole instead, set FARANDOLE_HOROVOD=1 or uninstall it.",
            os.path.dirname(spec.origin or ""),
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)


_found = None if os.environ.get("FARANDOLE_HOROVOD") == "1" else _installed()
if _found is not None:
    _become(_found)
else:
    try:
        from farandole.horovod import names
    except ModuleNotFoundError as error:
        if error.name != "farandole":
            raise
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__) from None
    names.stand_in()
