"""When the gradients of an optimizer are reduced and applied: the rules, and nothing else.

With ``backward_passes_per_step = n`` gradients add up locally over n backward passes, the *group*;
the n-th is reduced. What a script does with ``step()`` and ``zero_grad()`` in between decides:

==============================================  =====================================  ===========
the script calls                                what happens                           group after
==============================================  =====================================  ===========
backward, one of the first n-1                  stays local                            goes on
backward, the n-th or a later one               reduced when it ends                   complete
``step()``, group complete                      applied                                new
``step()``, after no backward at all            counts as a pass without gradients     see above
``step()``, after one backward, not complete    nothing: nothing applied, nothing sent goes on
``step()``, after several, not complete         the partial group is reduced, applied  new
the same, from then on after one as well        the partial group is reduced, applied  new
``zero_grad()`` after a ``step()`` that did     nothing: the gradients are needed      goes on
nothing
``zero_grad()`` otherwise                       gradients are cleared                  new
==============================================  =====================================  ===========

The last but two and but one: a script that calls backward several times before each ``step()``
accumulates by itself, so a short group at the end of its data is meant to be applied. One that
calls ``step()`` after every backward leaves it to us, and expects nothing until the n-th.
"""

from __future__ import annotations


class Accumulation:
    """Where one optimizer is in its group of backward passes. It decides; others act."""

    def __init__(self, passes_per_step: int) -> None:
        self.passes_per_step = passes_per_step
        self.steps = 0
        """Steps that were applied."""
        self.reduced = False
        """Whether the gradients of the group are those of all ranks."""
        self._passes = 0
        self._since_step = 0
        self._script_accumulates = False
        self._held = False

    def backward(self) -> bool:
        """A backward pass begins; says whether it is reduced."""
        self._held = False
        self._since_step += 1
        self._passes += 1
        return self._passes >= self.passes_per_step

    def is_due(self) -> bool:
        """``step()`` or ``synchronize()`` was called; says whether a reduction must happen now."""
        if self._since_step > 1:
            self._script_accumulates = True
        if self.reduced:
            return False
        if self._since_step == 0:
            self._since_step = 1
            self._passes += 1
        return self._script_accumulates or self._passes >= self.passes_per_step

    def step(self) -> bool:
        """``step()`` was called and what was due is reduced; says whether it applies anything."""
        self._since_step = 0
        if not self.reduced:
            self._held = True
            return False
        self.reset()
        self.steps += 1
        return True

    def clears(self) -> bool:
        """``zero_grad()`` was called; says whether it clears anything."""
        if self._held:
            return False
        self.reset()
        return True

    def reset(self) -> None:
        """A new group."""
        self.reduced = False
        self._passes = 0
        self._since_step = 0
        self._held = False
