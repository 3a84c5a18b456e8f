"""The named path: ranks submit named requests in any order, and carry them out in one order.

``coordinator`` is the pure judge of what all ranks are ready for, in rank 0's hub; ``negotiator``
what a rank holds; ``wire`` what the two say to each other.
"""
