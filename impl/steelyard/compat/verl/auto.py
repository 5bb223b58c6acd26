"""Importing this module calls ``install()``: for ``VERL_USE_EXTERNAL_MODULES``, the modules that verl imports."""

from steelyard.compat.verl.swap import install

install()
