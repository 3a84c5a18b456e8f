"""The planned path: buckets of gradients, agreed once, that leave under the backward pass."""
