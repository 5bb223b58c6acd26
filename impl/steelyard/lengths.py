"""Where sequence lengths come from: tables shipped as data, one mixture, and a user's own CSV or JSONL file.

Every draw is a function of (workload, rows, seed) alone, the same on every platform and numpy version: it takes raw
64-bit words of PCG64 (whose stream numpy guarantees, unlike those of ``Generator``'s distributions) and does integer
arithmetic on them. Row ``i`` uses its own words, so a longer draw from a table starts with the shorter one of the seed.

What the shipped tables are, their licences and their sources stand in ``data/length_quantiles.json``. A table holds the
quantiles 0, 0.01 … 1 of prompt and of response lengths apart, so drawn prompts and responses are independent of each
other; rows of a user's file keep prompt and response together. Between two quantiles lengths are spread evenly, so
of the longest hundredth only the two ends are exact, and its mean is above the trace's where the tail is steep.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from steelyard.errors import LengthsError
from steelyard.hints import did_you_mean
from steelyard.lengths_file import LONGEST, read_columns

__all__ = ["FileWorkload", "LengthSample", "Workload", "names", "read_lengths", "workload"]


@dataclass(frozen=True, eq=False)
class LengthSample:
    """Lengths of a batch of rollouts, in tokens.

    Attributes:
        prompts, responses: int64 arrays of shape [rows], read-only.
        name, source: the workload they were drawn from, and where its statistics come from.
        scale: what the lengths were divided by (1 means full size).
        seed: the seed of the draw.
    """

    prompts: np.ndarray
    responses: np.ndarray
    name: str
    source: str
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.prompts.setflags(write=False)
        self.responses.setflags(write=False)

    @property
    def totals(self) -> np.ndarray:
        """Prompt plus response of each row, int64 [rows]."""
        return self.prompts + self.responses

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, eq=False)
class Workload:
    """A distribution of prompt and response lengths.

    Attributes:
        name, source, licence: what it is called, where its statistics come from, and under which licence.
        rows: how many rollouts the statistics describe.
    """

    name: str
    source: str
    licence: str
    rows: int

    def draw(
        self,
        rows: int,
        seed: int,
        *,
        scale: float = 1.0,
        max_prompt: int | None = None,
        max_response: int | None = None,
    ) -> LengthSample:
        """Draw ``rows`` rollouts.

        Args:
            rows: how many, at least 1.
            seed: a whole number of at least 0; equal seeds give equal samples.
            scale: divides every length, rounding up (16 makes a sixteenth); a length that is not 0 stays at least 1.
            max_prompt, max_response: longer ones are cut to this, after scaling, as a trainer's limits would.

        Raises:
            LengthsError: an argument is out of range.
        """
        rows = _whole("rows", rows, least=1)
        seed = _whole("seed", seed, least=0)
        if not (isinstance(scale, int | float | np.number) and math.isfinite(scale) and scale > 0):
            raise LengthsError(f"scale={scale!r} must be a number above 0 (16 makes lengths a sixteenth)")
        prompts, responses = self._draw(rows, seed)
        drawn = []
        for what, lengths, most in (("max_prompt", prompts, max_prompt), ("max_response", responses, max_response)):
            scaled = np.ceil(lengths / scale)
            if scaled.max() > LONGEST:
                raise LengthsError(f"scale={scale!r} makes a length of {scaled.max():.0f} tokens, above {LONGEST}")
            scaled = scaled.astype(np.int64)
            drawn.append(scaled if most is None else np.minimum(scaled, _whole(what, most, least=1)))
        return LengthSample(drawn[0], drawn[1], self.name, self.source, float(scale), seed)

    def _draw(self, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Table(Workload):
    """Quantiles at 0, 1/n … 1 of prompts and of responses; linear between neighbours, rounded to the nearest token."""

    prompt_quantiles: np.ndarray
    response_quantiles: np.ndarray

    def _draw(self, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        words = _words(seed, rows, 2) >> np.uint64(32)
        return _inverse(self.prompt_quantiles, words[:, 0]), _inverse(self.response_quantiles, words[:, 1])


@dataclass(frozen=True, eq=False)
class _Mixture(Workload):
    """Components with normal prompts and responses; the total is clipped by changing the response."""

    weights: np.ndarray
    prompt: np.ndarray  # [2, components]: mean, standard deviation
    response: np.ndarray
    clip_total: tuple[int, int]

    def _draw(self, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        # Open interval (0, 1): the inverse of the normal distribution has no value at its ends. Its last bit may differ
        # between platforms, which a rounded length does not show.
        uniform = ((_words(seed, rows, 3) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        edges = np.cumsum(self.weights) / np.sum(self.weights)
        component = np.minimum(np.searchsorted(edges, uniform[:, 0], side="right"), len(edges) - 1)
        inverse = NormalDist().inv_cdf
        prompt, response = (
            mean_std[0, component] + mean_std[1, component] * np.array([inverse(u) for u in uniform[:, column]])
            for column, mean_std in ((1, self.prompt), (2, self.response))
        )
        low, high = self.clip_total
        prompts = np.clip(np.rint(prompt).astype(np.int64), 1, high - 1)
        return prompts, np.clip(np.rint(response).astype(np.int64), np.maximum(low - prompts, 1), high - prompts)


@dataclass(frozen=True, eq=False)
class FileWorkload(Workload):
    """The rows of a user's file.

    ``draw`` takes distinct rows while the file has enough of them, and draws with replacement when more are asked for;
    the prompt and the response of a row stay together.

    Attributes:
        prompts, responses: int64 arrays of shape [rows], in the file's order, read-only.
    """

    prompts: np.ndarray = field(repr=False)
    responses: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        self.prompts.setflags(write=False)
        self.responses.setflags(write=False)

    @property
    def totals(self) -> np.ndarray:
        """Prompt plus response of each row, int64 [rows]."""
        return self.prompts + self.responses

    def __len__(self) -> int:
        return self.rows

    def _draw(self, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        if rows <= self.rows:
            picked = np.argsort(_words(seed, self.rows, 1)[:, 0], kind="stable")[:rows]
            return self.prompts[picked], self.responses[picked]
        words = _words(seed, rows, 1)[:, 0] >> np.uint64(32)
        drawn = ((words * np.uint64(self.rows)) >> np.uint64(32)).astype(np.int64)
        return self.prompts[drawn], self.responses[drawn]


def names() -> list[str]:
    """Names of the shipped workloads, in alphabetical order."""
    return sorted(_shipped())


def workload(name: str) -> Workload:
    """The shipped workload called ``name``; raises ``LengthsError`` with close matches when there is none."""
    try:
        entry = _shipped()[name]
    except (KeyError, TypeError):
        hint = did_you_mean(str(name), names())
        raise LengthsError(
            f"unknown workload {name!r}{hint}: choose one of {', '.join(names())}, or read your own file"
        ) from None
    about = (name, entry["source"] + ("; " + entry["note"] if "note" in entry else ""), entry["licence"], entry["rows"])
    if "mixture" in entry:
        part = entry["mixture"]
        prompt, response = (np.array([part[f"{what}_mean"], part[f"{what}_std"]]) for what in ("prompt", "response"))
        low, high = entry["clip_total"]
        return _Mixture(*about, np.array(part["weights"]), prompt, response, (low, high))
    # Statistics without prompts get prompts of one fixed length, so that only what was published varies.
    prompts = entry["prompt_tokens"] or [entry["prompt_fixed"]] * 2
    return _Table(*about, np.array(prompts, dtype=np.int64), np.array(entry["response_tokens"], dtype=np.int64))


def read_lengths(
    path: str | Path,
    prompt_column: str | None = None,
    response_column: str = "response_tokens",
    *,
    fixed_prompt: int = 1,
) -> FileWorkload:
    """Read lengths from a CSV (.csv, or .tsv with tabs) or a JSONL file (.jsonl, .ndjson, .json: one object per line).

    A length is a whole number from 0 to 2**31-1; prompt and response of a row may not both be 0. CSV cells hold plain
    digits, so ``3.0`` is refused there; in JSONL the numbers ``3`` and ``3.0`` are the same length (JSON has one kind
    of number), while strings, booleans and null are refused.

    Args:
        path: the file; its suffix says which format it has.
        prompt_column: column of the prompt lengths; None when the file has none.
        response_column: column of the response lengths.
        fixed_prompt: length of every prompt when there is no prompt column; 1 by default, because the first token of a
            response is predicted from a token before it.

    Raises:
        LengthsError: the file can't be read, is empty, lacks a column, or holds something that is not a length. The
            text has the file, the line, the column and the value in one line.
    """
    columns = [response_column] if prompt_column is None else [prompt_column, response_column]
    rows = read_columns(Path(path), columns)
    responses = np.array(rows[-1], dtype=np.int64)
    if prompt_column is None:
        prompts = np.full_like(responses, _whole("fixed_prompt", fixed_prompt, least=1))
        source = f"{Path(path).name}, column {response_column}, every prompt {fixed_prompt}"
    else:
        prompts = np.array(rows[0], dtype=np.int64)
        source = f"{Path(path).name}, columns {prompt_column} and {response_column}"
    return FileWorkload(Path(path).stem, source, "the user's own file", len(responses), prompts, responses)


@functools.cache
def _shipped() -> dict[str, Any]:
    text = (resources.files("steelyard") / "data" / "length_quantiles.json").read_text(encoding="utf-8")
    shipped: dict[str, Any] = json.loads(text)["workloads"]
    return shipped


def _words(seed: int, rows: int, per_row: int) -> np.ndarray:
    """Raw 64-bit words of PCG64, uint64 [rows, per_row]."""
    return np.random.PCG64(seed).random_raw(rows * per_row).reshape(rows, per_row)


def _inverse(quantiles: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Lengths at the quantiles words/2**32, in integers: interpolated linearly and rounded to the nearest."""
    position = words * np.uint64(len(quantiles) - 1)
    below = (position >> np.uint64(32)).astype(np.int64)
    share = (position & np.uint64(2**32 - 1)).astype(np.int64)
    step = quantiles[below + 1] - quantiles[below]
    return np.maximum(quantiles[below] + ((share * step + 2**31) >> 32), 1)


def _whole(what: str, value: Any, *, least: int) -> int:
    """``value`` as an int of at least ``least``, or a ``LengthsError`` that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number < 2**63:
        raise LengthsError(f"{what}={value!r} must be a whole number of at least {least} and below 2**63")
    return number
