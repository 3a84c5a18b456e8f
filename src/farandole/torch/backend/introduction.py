"""How the ranks of a process group find each other through the store that torch gives them.

Each tells the others which host it is on. Then rank 0 lends out a store of ours and says where it
is; all else goes through that one. torch's store shows what it holds to anybody who can connect to
it, so the secret never goes there: it is in every rank's environment (``farandole run`` puts it
there), or, on one machine, in a file that only this user can read, whose name the store carries.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from farandole.comm import meeting
from farandole.comm.meeting import LOOPBACK, Meeting
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import DeadlineError, SetupError, UsageError, describe_ranks
from farandole.core.secret import Secret
from farandole.core.store import StoreClient, StoreServer
from farandole.core.topology import host_identity

TorchStore = Any
"""A ``torch.distributed.Store``: torch's stubs leave most of its methods out."""

_introductions: Counter[str] = Counter()
"""How often this process met others under a name: torch's store outlives its process groups."""


def introduce(
    store: TorchStore, name: str, rank: int, size: int, settings: Settings, deadline: Deadline
) -> Meeting:
    """Meet the ``size`` ranks of the process group ``name``, which all call this.

    Raises ``DeadlineError``, which names the ranks that did not come, and ``UsageError`` when
    they are on several hosts and have no secret, or no way to find each other's addresses.
    """
    prefix = f"farandole/{name}/{_introductions[name]}/"
    _introductions[name] += 1
    get = _Getter(store, prefix, size, deadline)
    store.set(f"{prefix}host/{rank}", host_identity())
    one_host = len({get(f"host/{each}") for each in range(size)}) == 1
    own = LOOPBACK if one_host else _own_address(store, settings)
    if settings.secret is None and not one_host:
        raise UsageError(
            "The ranks are on several machines, and torch.distributed's store would show a secret "
            "to anybody. Set FARANDOLE_SECRET to the same value on every machine: 64 hexadecimal "
            "digits from a random source, as from `openssl rand -hex 32`."
        )
    if rank == 0:
        return _lend(store, f"{prefix}where", settings.secret, own)
    where = json.loads(get("where"))
    secret = settings.secret or _secret_in(where["file"])
    client = StoreClient(Address.parse(where["address"]), secret, deadline)
    return Meeting(client, secret, address=own)


def _lend(store: TorchStore, key: str, known: Secret | None, own: str) -> Meeting:
    secret = known or Secret.new()
    server = StoreServer(secret, own)
    where = {"address": str(server.address)}
    file = None
    if known is None:
        where["file"] = secrets.token_hex(16)
        file = meeting.private_directory() / where["file"]
        meeting.publish(file, {**where, "secret": secret.hex()})
    store.set(key, json.dumps(where))
    return Meeting(server.store, secret, address=own, server=server, file=file)


def _secret_in(name: str) -> Secret:
    file = meeting.private_directory() / name
    found = meeting.read(file)
    if found is None:
        raise SetupError(
            f"Rank 0 has left the job's secret in {file.name}, which is not in {file.parent} here: "
            "the ranks run as different users or with different XDG_RUNTIME_DIR or TMPDIR. Give "
            "all ranks the same FARANDOLE_SECRET, as from `openssl rand -hex 32`."
        )
    return Secret.from_hex(found["secret"])


def _own_address(store: TorchStore, settings: Settings) -> str:
    """The local address that the host of torch's store, and so the other ranks, can reach."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise UsageError(
            f"The ranks are on several machines, and torch's {type(store).__name__} does not tell "
            "how they reach each other. Use init_method='env://' or 'tcp://HOST:PORT'."
        )
    return meeting.own_address(Address(store.host, store.port), settings)


@dataclass
class _Getter:
    """Waits for keys below ``prefix``."""

    store: TorchStore
    prefix: str
    size: int
    deadline: Deadline

    def __call__(self, key: str) -> str:
        left = self.deadline.remaining() or 0.001
        try:
            self.store.wait([self.prefix + key], datetime.timedelta(seconds=left))
        except RuntimeError as error:  # its kind depends on the kind of store
            raise self._missed(error) from error
        return str(self.store.get(self.prefix + key).decode())

    def _missed(self, error: RuntimeError) -> DeadlineError:
        ranks = range(self.size)
        late = [rank for rank in ranks if not self.store.check([f"{self.prefix}host/{rank}"])]
        return DeadlineError(
            f"The process group of {self.size} ranks did not form within {self.deadline.limit:g} "
            f"s: {f'{describe_ranks(late)} did not come' if late else 'rank 0 did not go on'}. "
            f"torch's store says: {str(error).partition(chr(10))[0]}",
            ranks=late,
        )
