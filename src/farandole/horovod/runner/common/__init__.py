"""What Horovod's launchers have in common, under its names."""
