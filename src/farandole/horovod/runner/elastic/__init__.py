"""What programs and tests import of Horovod's driver of elastic jobs."""
