"""Which module each of Horovod's module names leads to.

``horovod.torch`` and what is in it are ``farandole.torch``; everything else is here, in
``farandole.horovod``. The modules are the same objects under both names, so that a class is one
class however a program came by it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, cast

_ROOT = "horovod"
_FRONTS = {"horovod.torch": "farandole.torch"}


def stand_in() -> None:
    """Make ``horovod`` and the modules in it names of Farandole's, in this process, from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # Before the finder of files, which would load the same file again under another name.
        sys.meta_path.insert(0, _Finder())
    sys.modules[_ROOT] = importlib.import_module(__package__ or "")


def target(name: str) -> str | None:
    """The module of ours that Horovod's module ``name`` leads to, if there were one.

    Example::

        target("horovod.torch.mpi_ops")   # "farandole.torch.mpi_ops"
        target("horovod.runner")          # "farandole.horovod.runner"
        target("numpy")                   # None
    """
    if not name.startswith(_ROOT + "."):
        return None
    for front, ours in _FRONTS.items():
        if name == front or name.startswith(front + "."):
            return ours + name[len(front) :]
    return f"{__package__}{name[len(_ROOT) :]}"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target_module: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = target(fullname)
        found = None if ours is None else importlib.util.find_spec(ours)
        if found is None:
            return None
        package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _SameModule(found), is_package=package)


class _SameModule(Loader):
    """Gives a module that exists another name."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # It has been executed. The import system has just written the other name's spec into it.
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m horovod.runner.launch``."""
        loader = cast(Any, self._spec.loader)
        code: CodeType | None = loader.get_code(self._spec.name)
        return code
