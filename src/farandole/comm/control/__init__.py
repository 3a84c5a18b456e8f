"""The control channel: small agreements, the news of lost ranks, the watch over blocked ones.

No torch here. ``channel`` is what a rank holds, ``hub`` is rank 0's end, ``watch`` the pure judge.
"""
