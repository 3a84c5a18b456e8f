"""Settings, errors, events, clock, topology, wire and store. Standard library only: every other room stands on this one."""
