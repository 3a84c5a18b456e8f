"""How long an allreduce takes between two hosts with a slow network: by stages, and flat.

    python bench/hierarchy.py [--rounds 5] [--ranks 2 4] [--mib 16 64] [--json]

Needs root: the hosts are two network namespaces of this machine, joined by a veth pair whose ends
tc's tbf limits to 1 Gbit/s each. On each host sit 2 ranks, then 4, of one thread each. They sum
a buffer of float32 with the engine ``hierarchical`` and with the flat engine ``torch`` (Gloo), in
turns, and who goes first alternates. A round's time is the slowest rank's; figures are medians.

*Bound* is what the wire allows: 2(H-1)/H of the bytes for H hosts, over the link's rate; no
protocol's overhead is taken off. *Bytes* is what the veth's counters say each host has sent, at
most, over the buffer's size. ``--json`` prints one line at the end: ``ratios`` (ours over the
flat engine's time), ``bounds`` (our time over the bound), ``bytes``, ``seconds``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Reduction, Seat
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.secret import Secret
from farandole.core.store import StoreClient, StoreServer

BITS_PER_SECOND = 1_000_000_000
MIB = 1024 * 1024
HOSTS = ("10.79.0.1", "10.79.0.2")
CABLE = "cable"
LIMIT = 170.0
"""Seconds for everything."""

WARM_UP = 2

SYSTEMS = {"hierarchical": "hierarchical", "flat": "torch"}


class Rank:
    """One process: its host, its place among the ranks of that host, and the others' store."""

    def __init__(self, host: int, local_rank: int) -> None:
        self.host = host
        self.local_rank = local_rank
        address = Address.parse(os.environ["BENCH_STORE"])
        secret = Secret.from_hex(os.environ["BENCH_SECRET"])
        self.store = StoreClient(address, secret, Deadline.after(LIMIT))

    def open(self, system: str, ranks: int) -> Engine:
        """The channel of ``system`` over ``ranks`` ranks of each host."""
        return registry.opener(SYSTEMS[system])(
            Seat(
                rank=self.host * ranks + self.local_rank,
                size=len(HOSTS) * ranks,
                channel=f"{system}/{ranks}",
                store=self.store,
                device=torch.device("cpu"),
                hosts=tuple(host for host in HOSTS for _ in range(ranks)),
                address=HOSTS[self.host],
                deadline=Deadline.after(LIMIT),
            )
        )

    def measure(self, ranks: int, sizes: list[int], rounds: int) -> dict[str, list[Any]]:
        """(seconds, bytes sent by this host) of each round, by system and size."""
        engines = {system: self.open(system, ranks) for system in SYSTEMS}
        found: dict[str, list[Any]] = {}
        for size in sizes:
            buffer = torch.ones(size * MIB // 4)
            for number in range(-WARM_UP, rounds):
                for system in list(SYSTEMS)[:: 1 if number % 2 else -1]:
                    buffer.fill_(1.0)
                    engines[system].barrier().wait()
                    sent, begin = _sent(), time.perf_counter()
                    engines[system].allreduce(buffer, Reduction.SUM).wait()
                    seconds = time.perf_counter() - begin
                    engines[system].barrier().wait()
                    if number >= 0:
                        found.setdefault(f"{system} {size}", []).append((seconds, _sent() - sent))
                    total = float(len(HOSTS) * ranks)
                    assert bool((buffer == total).all()), f"{system}: not {total}"
        for engine in engines.values():
            engine.close()
        return found


def _sent() -> int:
    return int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text())


def be_rank(options: argparse.Namespace) -> None:
    """What each process of the hosts does."""
    torch.set_num_threads(1)
    host, local_rank = map(int, options.be.split("."))
    rank = Rank(host, local_rank)
    for ranks in options.ranks:
        if local_rank < ranks:
            found = rank.measure(ranks, options.mib, options.rounds)
            rank.store.set(f"found/{ranks}/{options.be}", json.dumps(found).encode())
        rank.store.get(f"go on/{ranks}", Deadline.after(LIMIT))


def lead(options: argparse.Namespace, names: list[str]) -> None:
    """In the first host: start all ranks, collect what they found, print it."""
    secret = Secret.new()
    server = StoreServer(secret, HOSTS[0])
    environ = {
        **os.environ,
        "BENCH_STORE": str(server.address),
        "BENCH_SECRET": secret.hex(),
        "OMP_NUM_THREADS": "1",
    }
    per_host = max(options.ranks)
    ranks = [f"{host}.{local}" for host in range(len(HOSTS)) for local in range(per_host)]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", names[int(each[0])], *_self(), "--be", each], env=environ
        )
        for each in ranks
    ]
    figures: dict[str, dict[str, float]] = {
        "ratios": {}, "bounds": {}, "bytes": {}, "seconds": {}
    }  # fmt: skip
    print(f"{'':14}{'ours':>10}{'flat':>10}{'ratio':>8}{'of bound':>10}{'bytes':>8}{'flat':>8}")
    try:
        for count in options.ranks:
            keys = [each for each in ranks if int(each[2:]) < count]
            found = [
                json.loads(server.store.get(f"found/{count}/{key}", Deadline.after(LIMIT)))
                for key in keys
            ]
            for size in options.mib:
                report(figures, found, count, size)
            server.store.set(f"go on/{count}", b"")
        for process in processes:
            process.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.close()
    if options.json:
        print(json.dumps(figures))


def report(
    figures: dict[str, dict[str, float]], found: list[dict[str, Any]], ranks: int, size: int
) -> None:
    """Judge one layout and size: a round is as slow as its slowest rank and its fullest wire."""
    key = f"{len(HOSTS)} x {ranks} ranks {size}MiB"
    seconds, sent = {}, {}
    for system in SYSTEMS:
        rounds = list(zip(*(each[f"{system} {size}"] for each in found), strict=True))
        seconds[system] = statistics.median(max(time for time, _ in each) for each in rounds)
        sent[system] = max(max(count for _, count in each) for each in rounds) / (size * MIB)
    bound = 2 * (len(HOSTS) - 1) / len(HOSTS) * size * MIB * 8 / BITS_PER_SECOND
    ratio = seconds["hierarchical"] / seconds["flat"]
    figures["ratios"][f"flat {key}"] = round(ratio, 3)
    figures["bounds"][key] = round(seconds["hierarchical"] / bound, 3)
    for system in SYSTEMS:
        figures["seconds"][f"{system} {key}"] = round(seconds[system], 4)
        figures["bytes"][f"{system} {key}"] = round(sent[system], 3)
    print(
        f"2 x {ranks}, {size:3} MiB{1e3 * seconds['hierarchical']:>7.0f} ms"
        f"{1e3 * seconds['flat']:>7.0f} ms{ratio:>8.2f}{figures['bounds'][key]:>10.2f}"
        f"{sent['hierarchical']:>8.2f}{sent['flat']:>8.2f}",
        flush=True,
    )


@contextlib.contextmanager
def two_hosts(bits_per_second: float | None = BITS_PER_SECOND) -> Iterator[list[str]]:
    """The names of two network namespaces and the cable between them; ``None``: without a limit."""
    names = [f"bench{os.getpid()}-{side}" for side in ("a", "b")]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", names[0], "link", "add", CABLE, "type", "veth",
             "peer", "name", CABLE, "netns", names[1])  # fmt: skip
        for name, address in zip(names, HOSTS, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            _run("ip", "-n", name, "link", "set", CABLE, "up")
            if bits_per_second is not None:
                _run("tc", "-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf",
                     "rate", f"{bits_per_second}bit", "burst", "128kb",
                     "latency", "20ms")  # fmt: skip
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _self() -> list[str]:
    return [sys.executable, *sys.argv]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of each host")
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64], help="size of the buffer")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--lead", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be_rank(options)
    elif options.lead:
        lead(options, options.lead)
    elif os.geteuid() != 0:
        raise SystemExit("Two hosts on one machine are network namespaces: this needs root.")
    else:
        with two_hosts() as names:
            inside = ["ip", "netns", "exec", names[0], *_self(), "--lead", *names]
            raise SystemExit(subprocess.run(inside, check=False).returncode)


if __name__ == "__main__":
    main()
