"""Which rank sees which sample."""
