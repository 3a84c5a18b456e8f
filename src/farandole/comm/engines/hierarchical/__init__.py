"""The ``hierarchical`` engine: what ranks of one host can settle among themselves stays there.

Belongs here: how ranks on hosts are arranged, and how an operation is made of operations inside the
hosts and across them. Refused: moving a byte, which the engines below it do; choosing this engine,
which ``comm.engines.choice`` does.
"""
