"""The groups of ours behind torch's process groups.

The default process group is a root group, with a control channel of its own beside the one of
``init()``: each may be there without the other. Process groups made of it are parts of that root,
so ranks in errors are torch's global ranks, and one watch sees all. A process group of ours beside
a default one of another backend is a root by itself.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

from farandole.comm import group as groups
from farandole.comm.group import Group
from farandole.comm.meeting import Meeting
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.topology import Placement
from farandole.torch import session
from farandole.torch.backend.introduction import introduce

Options = Any
"""torch's ``_DistributedBackendOptions``: what it tells a backend of the group to be made."""


class Place:
    """This rank's place in one process group."""

    def __init__(self, group: Group, address: str, meeting: Meeting | None = None) -> None:
        self.group = group
        self.address = address
        """A local address that the group's other ranks can reach."""
        self._meeting = meeting

    def leave(self, reason: str | None = None) -> None:
        """Give it up; what is in flight fails. ``reason`` is given when this rank ends badly."""
        global _default
        if self._meeting is None:
            self.group.close()
            return
        if _default is self:
            _default = None
        self.group.control.close(reason)
        self.group.close()
        self._meeting.close()


_default: Place | None = None
"""The place in torch's default process group, if that is one of ours."""

_roots: weakref.WeakSet[Place] = weakref.WeakSet()


@atexit.register
def _leave_at_exit() -> None:
    """Scripts may end without ``destroy_process_group()``; that is no loss of a rank."""
    for place in list(_roots):
        place.leave(session.reason_of_end())


def take(options: Options) -> Place:
    """Form the group that torch asks for with all its ranks.

    Raises what :func:`introduce` and ``Control.form`` raise when the ranks do not come together.
    """
    global _default
    ranks = list(options.global_ranks_in_group)
    if ranks and _default is not None:
        part = _default.group.part(f"c10d/{options.group_id}", ranks, -1)
        assert part is not None, "torch asks the ranks of a group alone"
        return Place(part, _default.address)
    settings = Settings.from_environment()
    deadline = Deadline.after(min(settings.start_timeout, options.timeout.total_seconds()))
    rank, size, name = options.group_rank, options.group_size, options.group_id
    meeting = introduce(options.store, name, rank, size, settings, deadline)
    placement = Placement(
        rank=rank, size=size, local_rank=None, local_size=None,
        source="torch.distributed", job=name, coordinator=None,
    )  # fmt: skip
    try:
        group = groups.form(meeting, placement, settings, settings.engine, deadline)
    except BaseException:
        meeting.close()
        raise
    place = Place(group, meeting.address, meeting)
    _roots.add(place)
    if not ranks:
        _default = place
    return place
