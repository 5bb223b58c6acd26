"""``python -m bench``: see ``bench.cli``."""

from bench.cli import app

# Ranks are started by multiprocessing, which imports this module again.
if __name__ == "__main__":
    app(prog_name="python -m bench")
