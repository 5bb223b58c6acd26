"""What a user overrides in a configuration dataclass of megatron-core: read from any form, checked by name and type."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from steelyard.errors import InputError
from steelyard.hints import did_you_mean


def read_overrides(kind: type, given: Any, name: str) -> dict[str, Any]:
    """The fields of dataclass ``kind`` that ``given`` sets.

    Args:
        kind: a configuration class of megatron-core.
        given: None, a mapping, an OmegaConf node (interpolations are resolved), or a dataclass instance, which sets
            all of its fields.
        name: what the user calls it, for messages.

    Raises:
        InputError: not one of these, a field that ``kind`` does not have (with the close ones), or a value whose type
            the field does not take.
    """
    overrides = _as_dict(given, name)
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    hints = typing.get_type_hints(kind)
    for field, value in overrides.items():
        if field not in known:
            hint = did_you_mean(str(field), known) or f": the fields are those of {kind.__name__}"
            raise InputError(f"{name} has the unknown field {field!r}{hint}")
        # megatron-core annotates some optional fields by their type alone.
        if not _fits(value, hints[field]) and not (value is None and known[field].default is None):
            raise InputError(
                f"{name}: {field}={value!r} is of type {type(value).__name__}; it takes {_type_name(hints[field])}"
            )
    return overrides


def _as_dict(given: Any, name: str) -> dict[str, Any]:
    if given is None:
        return {}
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(given):
        try:
            given = omegaconf.OmegaConf.to_container(given, resolve=True, throw_on_missing=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise InputError(f"{name} cannot be resolved: {str(error).splitlines()[0]}") from None
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}
    if isinstance(given, Mapping):
        return dict(given)
    raise InputError(f"{name}={given!r} is of type {type(given).__name__}: give a mapping of fields, or a dataclass")


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``; containers, callables and classes are left to megatron-core."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    return True


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))
