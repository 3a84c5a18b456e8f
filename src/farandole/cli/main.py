"""``farandole``: the entry point, and which file holds which command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. ``run`` has its processes started before anything else is imported."""
    agent = None
    if sys.argv[1:2] == ["run"]:
        from farandole.launch import early

        agent = early.start_agent(sys.argv[2:])
    from farandole.cli import commands

    commands.cli(obj=agent)


if __name__ == "__main__":
    main()
