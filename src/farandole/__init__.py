"""Distributed deep-learning training: Horovod's five-line API on living engines."""
