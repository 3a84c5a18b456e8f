"""Numbers in fewer bits: how gradients travel smaller, and what that leaves unsent."""
