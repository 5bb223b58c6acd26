"""Steelyard's planner, packing and memory under verl's names. Two lines make an installed verl use it:

    import steelyard.compat.verl
    steelyard.compat.verl.install()

Every process needs them; ``VERL_USE_EXTERNAL_MODULES=steelyard.compat.verl.auto`` in the environment of all processes
does the same without a line of code, because verl imports the modules named there whenever it is imported.

Modules here have the paths, functions, arguments and results of verl's; ``swap.MODULES`` lists them. They work
without verl too.
"""

from steelyard.compat.verl.swap import KNOWN_VERSIONS, MODULES, install, uninstall

__all__ = ["KNOWN_VERSIONS", "MODULES", "install", "uninstall"]
