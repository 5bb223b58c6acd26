"""What a message offers when a name is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" (did you mean …?)"`` with the names close to ``name``, or nothing when none is."""
    by_folded = {each.casefold(): each for each in known}
    close = [by_folded[each] for each in difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.5)]
    return f" (did you mean {' or '.join(close)}?)" if close else ""
