"""The ``shm`` engine: CPU tensors between the processes of one host, through memory they share.

Read ``flags`` (when may a rank read what another has written), ``board`` (where it lies), and
``collectives`` (what each rank does, as a generator that yields where it must await the others);
``driver`` says in which thread that runs, ``opening`` how the ranks come to share memory.
"""
