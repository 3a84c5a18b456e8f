"""Helpers of Horovod's launchers that tests import."""
