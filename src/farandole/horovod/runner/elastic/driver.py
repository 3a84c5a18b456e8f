"""How patient the driver of an elastic job is, where Horovod's programs and tests set it."""

from __future__ import annotations

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
"""Seconds between two calls of the discovery script."""

ELASTIC_TIMEOUT_SECS = 600
"""Seconds that training waits for enough ranks."""
