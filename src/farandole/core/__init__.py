"""Settings, errors, events, clock, topology, wire and store.

Standard library only: every other room stands on this one. It decides nothing about training,
collectives or jobs; what knows of those belongs above.
"""
