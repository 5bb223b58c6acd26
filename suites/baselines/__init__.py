"""The naive side: what people ran before they optimised, one file per mechanism.

Each file's docstring names the version that it reproduces. A baseline gets the same model, data, threads and warm-up as
the optimised side, shares its token losses, and is never slowed down to look worse.
"""
