"""Horovod's exceptions. Programs catch them; Farandole raises its own, which are kinds of them."""

from __future__ import annotations

from farandole.core.errors import CollectiveError as HorovodInternalError
from farandole.elastic.interrupt import HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that Horovod was built for. Never raised: nothing is built."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"Framework {name} installed with version {installed_version} but found version "
            f"{version}."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
