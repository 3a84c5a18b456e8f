"""How the ranks of a job come to share a store and a secret.

Under our launcher both are in the environment. A process that is alone needs neither. Otherwise
rank 0 lends out a store, and where it listens and its secret reach the others

* on one machine by a file that only this user can read, named after the job and the process that
  started the ranks (``mpiexec``'s, ``torchrun``'s or ``srun``'s on this machine, or a shell), so
  that jobs at the same time do not meet;
* on several machines, under ``torchrun``, by its own store. That store answers anybody, so it
  carries the address only, and the secret must be in every rank's environment.

A meeting outlives the groups that form in it: after ``shutdown()``, ``init()`` finds the others
where they were.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from farandole.comm.summons import Summons
from farandole.core import config, route
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import DeadlineError, FarandoleError, SetupError, UsageError
from farandole.core.placement import LAUNCHERS
from farandole.core.secret import Secret
from farandole.core.store import LocalStore, ReturningStore, Store, StoreClient, StoreServer
from farandole.core.topology import Placement

LOOPBACK = "127.0.0.1"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two looks for the file of rank 0."""


class Meeting:
    """What a process shares with the other ranks, for as long as it lives."""

    def __init__(
        self,
        store: Store,
        secret: Secret,
        *,
        address: str = LOOPBACK,
        server: StoreServer | None = None,
        file: Path | None = None,
        summons: Summons | None = None,
    ) -> None:
        self.store = store
        self.secret = secret
        self.address = address
        """A local address that the other ranks can reach."""
        self.summons = summons
        """In an elastic job, how its driver says who is in the next group."""
        self._server = server
        self._file = file
        self._generation = -1

    def next_generation(self) -> int:
        """The number of the next group: all ranks form the same groups in the same order."""
        self._generation += 1
        return self._generation

    def all_have_come(self) -> None:
        """Take down what showed the way here."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def close(self) -> None:
        """Leave for good."""
        self.all_have_come()
        self.store.close()
        if self._server is not None:
            self._server.close()


def meet(settings: Settings, placement: Placement, deadline: Deadline) -> Meeting:
    """Find the other ranks' store, or lend out one when this is rank 0.

    Raises ``UsageError`` when the settings do not say enough, ``DeadlineError`` when rank 0 does
    not show up, ``AuthenticationError`` when it holds another secret.
    """
    if settings.store_address is not None:
        return _meet_at(settings.store_address, settings, placement, deadline)
    if placement.size == 1:
        return Meeting(LocalStore(), settings.secret or Secret.new())
    if placement.local_size is None or placement.local_size == placement.size:
        return _meet_on_this_machine(settings, placement, deadline)
    if placement.source == "torchrun":
        return _meet_through_torchrun(settings, placement, deadline)
    raise UsageError(
        f"The {placement.size} ranks are on several machines, and {placement.source} gives no way "
        "for them to meet. Start them with torchrun and FARANDOLE_SECRET set alike on every "
        "machine, or set FARANDOLE_STORE and FARANDOLE_SECRET to a store that all can reach."
    )


def _meet_at(text: str, settings: Settings, placement: Placement, deadline: Deadline) -> Meeting:
    if settings.secret is None:
        raise UsageError("FARANDOLE_STORE is set, but FARANDOLE_SECRET is not. Set both.")
    address = Address.parse(text)
    store: Store
    if settings.driver_timeout > 0:
        patience = settings.driver_timeout
        store = ReturningStore(address, settings.secret, deadline, patience=patience)
    else:
        store = StoreClient(address, settings.secret, deadline)
    local = placement.local_size == placement.size and settings.worker is None
    own = LOOPBACK if local else own_address(address, settings)
    summons = (
        None if settings.worker is None else Summons(store, settings.worker, settings.stall_warning)
    )
    return Meeting(store, settings.secret, address=own, summons=summons)


def own_address(towards: Address, settings: Settings) -> str:
    """The local address that a host at ``towards`` can reach: the interface's, if one is set."""
    return route.own_address(towards, settings.network_interface)


# ------------------------------------------------------------------------------ on one machine


def _meet_on_this_machine(settings: Settings, placement: Placement, deadline: Deadline) -> Meeting:
    file = private_directory() / _file_name(placement)
    if placement.rank == 0:
        secret = settings.secret or Secret.new()
        server = StoreServer(secret)
        publish(file, {"address": str(server.address), "secret": secret.hex()})
        return Meeting(server.store, secret, server=server, file=file)
    pause = _FIRST_PAUSE
    while not deadline.expired():
        found = read(file)
        if found is not None:
            with contextlib.suppress(FarandoleError):  # what an earlier job left: look again
                secret = Secret.from_hex(found["secret"])
                patience = Deadline.after(min(5.0, deadline.remaining() or 5.0))
                return Meeting(
                    StoreClient(Address.parse(found["address"]), secret, patience), secret
                )
        deadline.clock.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise DeadlineError(
        f"Rank {placement.rank} of {placement.size} did not find rank 0 within "
        f"{deadline.limit:g} s (FARANDOLE_START_TIMEOUT): it has not called init(), has failed, "
        f"or runs on another machine. They meet through {file}; ranks that {placement.source} "
        "starts on several machines need FARANDOLE_STORE and FARANDOLE_SECRET.",
        ranks=[0],
    )


def private_directory() -> Path:
    """Where processes of this user leave files for each other; ``SetupError`` if it is not safe."""
    runtime = config.environment().get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        directory = Path(runtime) / "farandole"
    else:
        directory = Path(tempfile.gettempdir()) / f"farandole-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) & 0o077 == 0
    if status.st_uid != os.getuid() or not private:
        raise SetupError(
            f"The ranks would meet in {directory}, but others can write or read there, or it is "
            "not yours. Remove it, or set XDG_RUNTIME_DIR to a directory of your own."
        )
    return directory


def _file_name(placement: Placement) -> str:
    starter = _starter(placement)
    text = (
        f"{placement.source}\0{placement.job}\0{placement.size}\0{starter}\0{_start_time(starter)}"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _starter(placement: Placement) -> int:
    """The process that started the ranks: the nearest ancestor that was not itself given a rank.

    Between it and a rank there may be a shell or a tool that wraps the script, one for each rank;
    those inherited the rank's variables, the starter has not.
    """
    variable = next(each.rank for each in LAUNCHERS if each.source == placement.source)
    process = os.getppid()
    while process > 1 and _was_given(process, variable):
        process = _parent(process)
    return process


def _was_given(process: int, variable: str) -> bool:
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(each.startswith(variable.encode() + b"=") for each in variables)


def _parent(process: int) -> int:
    return int(_status(process)[1])


def _start_time(process: int) -> str:
    try:
        return _status(process)[19]
    except OSError:
        return ""


def _status(process: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold blanks and parentheses."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def publish(file: Path, content: dict[str, str]) -> None:
    """Write ``file`` for processes of this user alone, at once and whole."""
    draft = file.with_suffix(f".{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(content, out)
    draft.replace(file)


def read(file: Path) -> dict[str, str] | None:
    """What :func:`publish` wrote to ``file``; ``None`` when it is not there."""
    try:
        content = json.loads(file.read_text())
    except OSError:
        return None
    return {name: str(content[name]) for name in ("address", "secret")}


# --------------------------------------------------------------------------- on several machines


def _meet_through_torchrun(settings: Settings, placement: Placement, deadline: Deadline) -> Meeting:
    if settings.secret is None:
        raise UsageError(
            "The ranks are on several machines, and torchrun's store would show a secret to "
            "anybody. Set FARANDOLE_SECRET to the same value on every machine: 64 hexadecimal "
            "digits from a random source, as from `openssl rand -hex 32`."
        )
    if placement.coordinator is None:
        raise UsageError("torchrun's MASTER_ADDR and MASTER_PORT are not set.")
    meeting_point = Address.parse(placement.coordinator)
    own = own_address(meeting_point, settings)
    key = f"farandole/{placement.job}"
    with _torchrun_errors(meeting_point, deadline):
        seconds = datetime.timedelta(seconds=deadline.remaining() or 3600.0)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            *meeting_point, is_master=False, timeout=seconds
        )
        if placement.rank == 0:
            server = StoreServer(settings.secret, own)
            store.set(key, str(server.address))
            return Meeting(server.store, settings.secret, address=own, server=server)
        address = Address.parse(store.get(key).decode())
    client = StoreClient(address, settings.secret, deadline)
    return Meeting(client, settings.secret, address=own)


@contextlib.contextmanager
def _torchrun_errors(address: Address, deadline: Deadline) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise DeadlineError(
            f"The ranks did not meet at torchrun's store at {address} within "
            f"{deadline.limit} s (FARANDOLE_START_TIMEOUT): {error}"
        ) from error
