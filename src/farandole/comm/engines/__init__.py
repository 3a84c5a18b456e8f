"""Engines move the bytes of one channel: ``base`` holds the contract, each other file is one implementation."""
