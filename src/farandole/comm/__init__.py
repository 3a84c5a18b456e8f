"""The centre: groups of ranks, their control channel, the collectives, and the engines."""
