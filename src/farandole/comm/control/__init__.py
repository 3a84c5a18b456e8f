"""The control channel of a group: small agreements, the news of a lost rank, and the watch over blocked ranks. No torch."""
