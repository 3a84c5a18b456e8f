"""The search for the best setting: successive halving, one dimension after the other. Pure.

Costs are noisy: two steps of training with one setting differ by more than most settings do. So a
search must not trust a single measurement, and must compare what was measured at about the same
time. *Successive halving* does both: all candidates of a dimension are tried in turn, the better
half stays, and is tried again, until one is left; the closer the race, the more often its
candidates were measured. For n candidates it takes about 2 n trials, known beforehand, and it
assumes nothing of the cost: no smoothness, no single minimum, no unit. The best of a dimension is
kept for the next one (*coordinate search*), so dimensions belong in the order of their effect.

Halving: Karnin, Koren and Somekh, *Almost optimal exploration in multi-armed bandits*, ICML 2013;
Jamieson and Talwalkar, *Non-stochastic best arm identification and hyperparameter optimization*,
AISTATS 2016. Rejected: Bayesian optimization with a Gaussian process, as Horovod has it. It needs a
scale of the noise that nobody knows, and for two or three dimensions of a handful of values there
is nothing to model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

Value = int | str
Setting = dict[str, Value]
"""A value for each dimension, by its name."""
Search = Generator[Setting, float, Setting]
"""Yields a setting to try and is sent its cost, the smaller the better; returns the best one."""


@dataclass(frozen=True)
class Dimension:
    """One thing that can be set."""

    name: str
    choices: Callable[[Setting], Sequence[Value]]
    """What is worth a trial, when the dimensions before have the values that they have in the
    argument. The value that it has there is tried in any case."""


def search(dimensions: Sequence[Dimension], start: Setting) -> Search:
    """Look for the setting of least cost, from ``start``, which has a value for every dimension.

    What is tried depends on the costs alone, so searches that are sent the same costs try the same.

    Example::

        looking = search([Dimension("size", lambda best: [1, 2, 4])], {"size": 1})
        setting = next(looking)
        while True:
            try:
                setting = looking.send(measure(setting))
            except StopIteration as end:
                best = end.value
                break
    """
    best = dict(start)
    for dimension in dimensions:
        # The value of now comes first: where costs are equal, nothing changes.
        candidates = list(dict.fromkeys([best[dimension.name], *dimension.choices(best)]))
        costs: dict[Value, list[float]] = {each: [] for each in candidates}
        while len(candidates) > 1:
            for each in candidates:
                costs[each].append((yield {**best, dimension.name: each}))
            ranked = sorted(candidates, key=lambda each: statistics.median(costs[each]))
            kept = set(ranked[: (len(ranked) + 1) // 2] if len(ranked) > 2 else ranked[:1])
            candidates = [each for each in candidates if each in kept]
        best[dimension.name] = candidates[0]
    return best
