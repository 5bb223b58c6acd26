"""Puts Steelyard's functions in place in an installed verl, and takes them out again.

What verl holds is not the function of the mirror module but a stand-in of its own that calls it. So a module that
imports the mirror on purpose keeps it after ``uninstall``, and one that got the name through verl does not.

Replaced are the names of verl's modules in ``MODULES`` and every module-level name, in any imported module, that is
bound to the same function. Modules imported later take what they find in verl. A function that was stored elsewhere
before (a default argument, a ``partial``, a list) stays what it was: install before such things are built.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from steelyard.errors import InputError

Function = Callable[..., Any]

KNOWN_VERSIONS = ("0.9.1",)  # whose behaviour the differential tests compare with
# Paths below both ``verl`` and this package; the ``__all__`` of the module here says which names are replaced.
MODULES = ("utils.seqlen_balancing", "utils.memory_utils", "models.mcore.util")

_in_place: dict[tuple[str, str], tuple[Function, Function]] = {}  # (module of verl, name) -> (verl's, stand-in)


def install() -> list[str]:
    """Replace verl's functions in this process; calling it again changes nothing but what was imported meanwhile.

    Returns:
        every "module.name" that now leads to Steelyard, sorted.

    Raises:
        InputError: verl is missing, has a version that is not in ``KNOWN_VERSIONS``, or is a changed copy whose
            functions take other arguments. Nothing is replaced then.
    """
    _check_version()
    pairs = [pair for path in MODULES for pair in _pairs(path)]  # all are checked before the first is replaced
    for place, verls, stand_in in pairs:
        _in_place[place] = (verls, stand_in)
    _rebind({id(verls): stand_in for verls, stand_in in _in_place.values()})
    stand_ins = {id(stand_in) for _, stand_in in _in_place.values()}
    return sorted(f"{module.__name__}.{name}" for module, name, value in _bindings() if id(value) in stand_ins)


def uninstall() -> None:
    """Give every name back the function of verl that it had; does nothing where nothing is installed."""
    _rebind({id(stand_in): verls for verls, stand_in in _in_place.values()})
    _in_place.clear()


def _check_version() -> None:
    known = ", ".join(KNOWN_VERSIONS)
    try:
        # From verl's external modules this runs while verl is being imported: its version is set by then.
        version = getattr(importlib.import_module("verl"), "__version__", None)
    except ImportError as error:
        raise InputError(
            f"verl cannot be imported ({error}): install verl {known} before steelyard.compat.verl"
        ) from error
    if version not in KNOWN_VERSIONS:
        raise InputError(
            f"verl {version} is installed but steelyard.compat.verl knows {known} only: install that version, or call "
            f"the functions of steelyard.compat.verl by themselves"
        )


def _pairs(path: str) -> list[tuple[tuple[str, str], Function, Function]]:
    """Place, verl's function and stand-in for what one module of ``MODULES`` still has to replace."""
    theirs, ours = importlib.import_module(f"verl.{path}"), importlib.import_module(f"{__package__}.{path}")
    pairs = []
    for name in ours.__all__:
        place = (theirs.__name__, name)
        current = getattr(theirs, name, None)
        if place in _in_place and current is _in_place[place][1]:
            continue
        function = getattr(ours, name)
        wanted = _mirrored(function)
        if current is None or _arguments(_parameters(current)) != _arguments(wanted):
            found = "nothing" if current is None else f"{name}({_shown(_parameters(current))})"
            raise InputError(
                f"{theirs.__name__} holds {found} where verl {KNOWN_VERSIONS[-1]} has {name}({_shown(wanted)}): this "
                f"verl was changed, so steelyard.compat.verl leaves it alone"
            )
        # A module of verl that was reloaded holds its own function again: the stand-in that others took stays in use.
        stand_in = _in_place[place][1] if place in _in_place else _stand_in(function, theirs.__name__)
        pairs.append((place, current, stand_in))
    return pairs


def _parameters(function: Function) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _mirrored(function: Function) -> list[inspect.Parameter]:
    """The parameters that verl's function has too: our own additions are keyword-only, and optional."""
    return [one for one in _parameters(function) if one.kind is not one.KEYWORD_ONLY]


def _arguments(parameters: list[inspect.Parameter]) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in parameters]


def _shown(parameters: list[inspect.Parameter]) -> str:
    return ", ".join(str(one.replace(annotation=inspect.Parameter.empty)) for one in parameters)


def _stand_in(function: Function, module: str) -> Function:
    @functools.wraps(function)
    def stand_in(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    stand_in.__module__ = module  # where pickle finds it again, in this process and in another
    return stand_in


def _bindings() -> list[tuple[ModuleType, str, Any]]:
    """Module-level names of all imported modules; read from the dictionaries, so that lazy modules stay lazy."""
    modules = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
    return [(module, name, value) for module in modules for name, value in list(vars(module).items())]


def _rebind(replacements: dict[int, Function]) -> None:
    for module, name, value in _bindings():
        if id(value) in replacements:
            vars(module)[name] = replacements[id(value)]
