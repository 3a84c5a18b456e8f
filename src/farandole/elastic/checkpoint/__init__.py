"""Checkpoints: written beside the training, sharded over ranks, published whole or not at all."""
