"""What asv tracks over commits.

The files here, and the naive baselines and workloads of ``suites/``, are those of the checkout that runs asv. They
measure the package ``steelyard`` that is installed in the environment: with ``virtualenv`` the commit's own wheel, with
``existing`` whatever that Python has, filed under the commit that ``--set-commit-hash`` names. A commit that does not
have what a benchmark needs is skipped, not failed.

``STEELYARD_BENCH_PROFILE`` is ``smoke``, ``regular`` (default) or ``full``; ``STEELYARD_BENCH_SIDE`` is ``optimised``
(default) or ``naive``. Each ``version`` is kept until what is measured changes, so that history survives edits.
"""
