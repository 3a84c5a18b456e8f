"""What tests need, users' and ours.

Ranks as threads or processes (``ranks``), a virtual clock, and the suites that check a contract.
"""
