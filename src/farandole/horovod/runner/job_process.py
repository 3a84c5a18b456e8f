"""The process that runs a job for ``horovod.run``, beside the program that called it.

``python -m farandole.horovod.runner.job_process INPUT OUTPUT PARENT``, with the numbers of two
pipes and of the caller's process. A job loop takes over signals and the children of its process,
which a notebook or a test has use for itself. What is to be run comes through the first pipe: a
line of JSON and, if it is to be called, the pickled function, which is not unpickled here. The
outcome goes through the second: a line of JSON and the results.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from farandole.core.errors import FarandoleError
from farandole.core.store import LocalStore
from farandole.horovod.runner import callee, jobs, parcels
from farandole.horovod.runner.options import Arguments
from farandole.launch import job, kernel
from farandole.launch.elastic import WHY


def main() -> None:
    """Run one job."""
    incoming, outgoing, parent = map(int, sys.argv[1:4])
    kernel.die_with(parent)
    for descriptor in (incoming, outgoing):
        os.set_inheritable(descriptor, False)
    with open(incoming, "rb") as pipe:
        wish = json.loads(pipe.readline())
        function = pipe.read()
    store = LocalStore()
    if function:
        parcels.put(store, callee.PATH, json.dumps(wish["path"]).encode())
        parcels.put(store, callee.FUNCTION, function)
    outcome, results = _run(Arguments(**wish["arguments"]), store)
    with open(outgoing, "wb") as pipe:
        pipe.write(json.dumps(outcome).encode() + b"\n")
        for result in results:
            pipe.write(result)


def _run(arguments: Arguments, store: LocalStore) -> tuple[dict[str, Any], list[bytes]]:
    try:
        task = jobs.task_of(arguments)
        code = job.run(task, jobs.agent_for(task), store)
    except FarandoleError as error:
        return {"error": error.message, "usage": isinstance(error, ValueError)}, []
    results = [parcels.take(store, callee.result_of(rank)) for rank in range(task.size)]
    failure = store.peek(callee.FAILURE)
    why = store.peek(WHY)
    outcome = {
        "code": code,
        "why": None if why is None else why.decode(),
        "failure": None if failure is None else json.loads(failure),
        "sizes": [None if result is None else len(result) for result in results],
    }
    return outcome, [result for result in results if result is not None]


if __name__ == "__main__":
    main()
