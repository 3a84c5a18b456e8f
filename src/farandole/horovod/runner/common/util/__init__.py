"""Helpers of Horovod's launchers that programs import."""
