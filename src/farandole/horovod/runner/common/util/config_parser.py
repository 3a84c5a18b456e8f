"""From a configuration file, or parsed arguments, to arguments and environment variables.

The names of the variables are attributes of this module: ``HOROVOD_CYCLE_TIME`` and so on.
"""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Container, Mapping, MutableMapping
from typing import Any

from farandole.core.errors import UsageError
from farandole.horovod.runner.options import LOG_LEVELS, OPTIONS, VARIABLES, Option, environment_of

__all__ = ["LOG_LEVELS", "set_args_from_config", "set_env_from_args", "validate_config_args"]

_OPPOSITES = {
    ("stall_check", "enabled"): "no_stall_check",
    ("logging", "hide_timestamp"): "log_with_timestamp",
}
"""Entries of a file that say the opposite of an option."""

_CONTROLLERS = {"gloo": "use_gloo", "mpi": "use_mpi"}


def __getattr__(name: str) -> str:
    if name in VARIABLES:
        return name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_args_from_config(
    args: Namespace, config: Mapping[str, Any], override_args: Container[str]
) -> list[str]:
    """Take from a configuration what the command line (``override_args``) did not give.

    Returns what is not known there, one line each. ``UsageError`` for values of the wrong type.
    """
    unknown: list[str] = []
    for section, entries in config.items():
        if section == "controller":
            _choose_controller(args, entries)
        elif isinstance(entries, Mapping):
            for key, value in entries.items():
                if not _set(args, section, key, value, override_args):
                    unknown.append(_not_known(f"{section}.{key}"))
        elif entries is not None:
            unknown.append(_not_known(section))
    return unknown


def set_env_from_args(env: MutableMapping[str, str], args: Namespace) -> MutableMapping[str, str]:
    """Add to ``env``, and return, the variables by which workers learn what was asked for."""
    env.update(environment_of(args))
    return env


def validate_config_args(args: Namespace) -> None:
    """``UsageError`` for a number that is out of its range."""
    for option in OPTIONS:
        value = getattr(args, option.name)
        if option.least is not None and value is not None:
            _validate(option, value)


def _validate(option: Option, value: Any) -> None:
    what = f"{option.name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{what} must be a number.")
    if option.least is not None and value < option.least:
        raise UsageError(f"{what} must be >= {option.least}.")
    if option.most is not None and value > option.most:
        raise UsageError(f"{what} must be in [{option.least}, {option.most}].")


def _set(
    args: Namespace, section: str, key: str, value: Any, override_args: Container[str]
) -> bool:
    opposite = _OPPOSITES.get((section, key))
    for option in OPTIONS:
        place = (option.section, option.key)
        if option.name == opposite or (option.key and place == (section, key)):
            break
    else:
        return False
    if option.name not in override_args and value is not None:
        _check_type(option, f"{section}.{key}", value)
        setattr(args, option.name, not value if opposite else value)
    return True


def _check_type(option: Option, place: str, value: Any) -> None:
    if option.kind is None and not isinstance(value, bool):
        raise UsageError(f"{place}: {value!r} is not accepted. Write true or false.")
    if option.kind is str and not isinstance(value, str):
        raise UsageError(f"{place}: {value!r} is not accepted. Write text, in quotes if need be.")
    if option.choices and value not in option.choices:
        raise UsageError(f"{place}: {value!r} is not one of {', '.join(option.choices)}.")


def _choose_controller(args: Namespace, name: Any) -> None:
    if args.use_gloo or args.use_mpi:
        return
    attribute = _CONTROLLERS.get(str(name).lower())
    if attribute is None:
        raise UsageError(f"controller: {name!r} is not accepted. Write gloo or mpi.")
    setattr(args, attribute, True)


def _not_known(place: str) -> str:
    known = [f"{option.section}.{option.key}" for option in OPTIONS if option.key]
    near = difflib.get_close_matches(place, known, n=1)
    return f"{place} is not known and has no effect.{f' Did you mean {near[0]}?' if near else ''}"
