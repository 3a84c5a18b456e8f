"""Training that survives: who is in, what survives a loss, and how a worker goes on.

What belongs here: the decisions about membership (pure), the driver that acts on them, what a
worker does when its group breaks, and the state that it rolls back to. What does not: tensors
(the fronts say how a model is saved) and starting processes (``launch``). ``membership``,
``policy`` and ``driver`` run beside the launcher and import no framework.
"""
