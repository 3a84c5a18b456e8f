"""Engines move the bytes of one channel.

``base`` holds the contract, ``registry`` finds an implementation by name, and what each one owes is
checked by ``farandole.testing.engine_contract``.
"""
