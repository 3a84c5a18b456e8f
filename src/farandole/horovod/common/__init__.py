"""What Horovod's fronts have in common, under its names."""
