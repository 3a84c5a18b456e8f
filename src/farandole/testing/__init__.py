"""What users' tests and ours need: ranks as threads or processes, a virtual clock, contract suites."""
