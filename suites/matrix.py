"""Matrices as data: a TOML file names suites, workloads, layouts and sizes; here it is checked and made into cells."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from steelyard import lengths
from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from steelyard.parallel import ParallelLayout

FOLDER = Path(__file__).parent / "matrices"


class Strict(BaseModel):
    """A frozen model that refuses keys it does not know: a typing error must not be silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sizes(Strict):
    """The sizes of the model that a cell trains; see ``steelyard.cost.ModelShape``."""

    layers: PositiveInt
    hidden: PositiveInt
    ffn: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab: PositiveInt
    tied: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False

    def shape(self) -> ModelShape:
        return ModelShape(**self.model_dump())


class Layout(Strict):
    """Sizes of the parallel layout of a cell; see ``steelyard.parallel.ParallelLayout``."""

    tp: PositiveInt = 1
    sp: bool | None = None
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    cp: PositiveInt = 1
    cp_kind: Literal["all_gather", "all_to_all"] = "all_gather"
    dp: PositiveInt = 1
    ep: PositiveInt = 1

    def parallel(self) -> ParallelLayout:
        return ParallelLayout(**self.model_dump())


class LengthsFile(Strict):
    """A user's own lengths instead of a shipped workload."""

    path: str
    prompt_column: str | None = None
    response_column: str


class Cell(Strict):
    """One combination that a suite weighs: everything needed to repeat it.

    Attributes:
        suite: the module of ``suites`` that measures it.
        workload: name of a table in ``steelyard.lengths``, or of the lengths file.
        lengths_file: where the lengths come from when they are the user's own.
        layout, model: parallel sizes and model sizes.
        role: ``actor``, ``critic`` or ``reward``.
        rows: sequences of one step, over all data-parallel ranks.
        scale: real lengths are divided by this to fit the device.
        max_tokens: token budget of a micro-batch per GPU; None lets the suite choose.
        micro_batch_size: rows of a micro-batch on the naive side.
        pairs: measured pairs of steps (naive, optimised); for planning, draws of lengths.
        warmup: steps of each side before the first measured pair.
        dtype: parameters and activations.
        seed: of weights, lengths and tokens.
        time_limit: seconds after which the cell is ended.
        whole_product: parity: every combination of split, form, budget, aggregation and options, not only every pair.
        fixed_tokens: planning: what one more micro-batch costs, as the linear work of so many tokens.
        planners: planning: the others that take part (``suites.baselines.planners``); empty means all.
    """

    suite: str
    workload: str
    lengths_file: LengthsFile | None = None
    layout: Layout = Layout()
    model: Sizes
    role: Literal["actor", "critic", "reward"] = "actor"
    rows: PositiveInt = 16
    scale: PositiveFloat = 1.0
    max_tokens: PositiveInt | None = None
    micro_batch_size: PositiveInt = 4
    pairs: PositiveInt = 5
    warmup: int = Field(default=1, ge=0)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    seed: int = 0
    time_limit: PositiveFloat = 300.0
    whole_product: bool = False
    fixed_tokens: float = Field(default=0.0, ge=0)
    planners: list[str] = []

    @property
    def id(self) -> str:
        """Short name, unique within a matrix, e.g. ``throughput/rl-code-16k-cap/dp2/actor``."""
        what: str = self.role
        if self.suite in ("packing", "planning"):  # they know no role, and are weighed at many sizes
            what = f"{self.rows}-rows" + (f"-fixed-{self.fixed_tokens:g}" if self.fixed_tokens else "")
        return "/".join((self.suite, self.workload, str(self.layout.parallel()).replace(" ", "-"), what))

    def draw(self) -> lengths.LengthSample:
        """The lengths of this cell's rows, already scaled."""
        if self.lengths_file is not None:
            file = self.lengths_file
            table = lengths.read_lengths(
                file.path, prompt_column=file.prompt_column, response_column=file.response_column
            )
            return table.draw(self.rows, self.seed, scale=self.scale)
        return lengths.workload(self.workload).draw(self.rows, self.seed, scale=self.scale)


class SuiteTable(Strict):
    """One ``[[suite]]`` of a matrix: the axes whose product gives its cells, and settings other than the defaults.

    ``rows`` is an axis where it is given, else a setting.
    """

    name: str
    workloads: tuple[str, ...] = Field(min_length=1)
    layouts: tuple[Layout, ...] = (Layout(),)
    roles: tuple[Literal["actor", "critic", "reward"], ...] = ("actor",)
    rows: tuple[PositiveInt, ...] = ()
    settings: dict[str, Any] = {}


class Matrix(Strict):
    """A whole matrix file."""

    name: str
    description: str
    model: Sizes
    defaults: dict[str, Any] = {}
    suite: tuple[SuiteTable, ...] = Field(min_length=1)

    def cells(self, lengths_file: LengthsFile | None = None) -> list[Cell]:
        """Every cell, in the order of the file. ``lengths_file`` takes the place of every workload."""
        cells: dict[str, Cell] = {}
        for table in self.suite:
            workloads = table.workloads if lengths_file is None else (Path(lengths_file.path).stem,)
            settings = {"model": self.model, **self.defaults, **table.settings}
            sizes: list[dict[str, Any]] = [{"rows": rows} for rows in table.rows] or [{}]
            for workload, layout, role, size in itertools.product(workloads, table.layouts, table.roles, sizes):
                axes = {"workload": workload, "lengths_file": lengths_file, "layout": layout, "role": role, **size}
                for key in settings.keys() & {"suite", *axes}:
                    raise InputError(
                        f"matrix {self.name}, suite {table.name}: setting {key!r} belongs to an axis: use name, "
                        f"workloads, layouts, roles or rows of the [[suite]] table"
                    )
                cell = Cell(suite=table.name, **axes, **settings)
                if cell.id in cells and lengths_file is not None:
                    # Tables that differ in their workloads became the same: the first says the settings.
                    continue
                if cell.id in cells:
                    raise InputError(f"matrix {self.name}: cell {cell.id} is there twice: remove one of the two")
                if lengths_file is None:
                    lengths.workload(workload)
                layout.parallel().check(cell.model.shape())
                if cell.rows % layout.dp:
                    raise InputError(
                        f"matrix {self.name}, cell {cell.id}: rows={cell.rows} must be a multiple of dp={layout.dp}: "
                        f"the naive side gives every data-parallel rank as many rows"
                    )
                cells[cell.id] = cell
        return list(cells.values())


def names() -> list[str]:
    """Names of the matrices that ship with the harness."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str, suites: list[str]) -> Matrix:
    """Read a matrix by name, or by path when ``name`` ends in ``.toml``; its suites must be among ``suites``.

    Raises:
        InputError: unknown matrix or suite, unreadable file, unknown key, or a value out of range.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        hint = did_you_mean(name, names())
        raise InputError(
            f"matrix {name!r} does not exist{hint}: choose one of {', '.join(names())}, or give a .toml file"
        )
    try:
        matrix = Matrix.model_validate({"name": path.stem, **tomllib.loads(path.read_text())})
        cells = matrix.cells()
    except OSError as error:
        raise InputError(f"matrix file {path} cannot be read ({error.strerror}): check its permissions") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"matrix file {path} is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        got = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        raise InputError(f"matrix file {path}, key {where}: {first['msg']}{got}") from None
    for cell in cells:
        if cell.suite not in suites:
            hint = did_you_mean(cell.suite, suites)
            raise InputError(
                f"matrix file {path}: suite {cell.suite!r} does not exist{hint}: choose one of {', '.join(suites)}"
            )
    return matrix
