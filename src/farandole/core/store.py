"""A small shared dictionary: how the processes of a job find each other.

Keys are text, values are bytes; nothing is interpreted or unpickled. Five ways to the same
promise (:class:`Store`): :class:`LocalStore` within a process, :class:`StoreServer` that lends one
out, :class:`StoreClient` that uses one over an authenticated connection, :class:`ReturningStore`
that does so anew when the server was lost and is back, and :class:`PrefixStore` that sees the part
of another store under a prefix.

Guarantees
    *One order.* Every operation is atomic, and all users see all operations in one order.

    *Waiting costs nothing.* A ``get`` that waits is woken by the ``set``; nobody polls.

    *No wait without an end.* A ``get`` ends at its deadline with an error that names the key;
    any operation ends with ``ConnectionLost`` when the store is closed or its process dies.

    *Threads.* Any thread may call anything at any time; a waiting ``get`` holds up nobody.
"""

from __future__ import annotations

from farandole.core.store_local import LocalStore, PrefixStore, Store
from farandole.core.store_remote import StoreClient, StoreServer
from farandole.core.store_returning import ReturningStore

__all__ = [
    "LocalStore", "PrefixStore", "ReturningStore", "Store", "StoreClient", "StoreServer",
]  # fmt: skip
