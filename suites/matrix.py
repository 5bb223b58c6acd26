"""Matrices as data: a TOML file names suites, workloads, layouts and sizes; here it is checked and made into cells.

The cells of a ``[[suite]]`` are the product of its axes, less what ``exclude`` names::

    [[suite]]
    name = "throughput"
    workloads = ["rl-code-16k-cap"]
    layouts = [{}, { dp = 2 }, { pp = 2, dp = 2 }]
    roles = ["actor", "critic"]
    axes = { micro_batch_size = [1, 4] }              # any setting of a cell can be an axis
    repeats = 2                                       # each cell again, in fresh processes
    settings = { rows = 16, time_limit = 120 }        # they override [defaults], as axes do
    exclude = [{ layout = { pp = 2 }, role = "critic" }]
    override = [{ when = { layout = { dp = 2 } }, settings = { pairs = 9 } }]

``exclude`` and ``when`` name axes; a layout matches when it has all the sizes that are given, a list when the value is
in it. Where several overrides match, the last one wins.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from steelyard import lengths
from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from steelyard.parallel import ParallelLayout

FOLDER = Path(__file__).parent / "matrices"
# Suites that know no role and are weighed at many sizes: their cells are named by their rows.
NAMED_BY_ROWS = ("bubbles", "packing", "planning")
# Suites whose other side (the judge, a configuration of transformers) is a dense model.
DENSE = ("overrides", "parity")


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
    rope_theta: PositiveFloat = 1e6
    norm_eps: PositiveFloat = 1e-6
    max_positions: PositiveInt = 32768
    experts: NonNegativeInt = 0
    experts_per_token: NonNegativeInt = 0
    moe_ffn: NonNegativeInt = 0
    shared_ffn: NonNegativeInt = 0
    shared_gate: bool = False
    norm_topk_prob: bool = False

    @model_validator(mode="after")
    def _make_a_model(self) -> Sizes:
        self.shape()
        return self

    def shape(self) -> ModelShape:
        return ModelShape(**self.model_dump())


def _named(model: object) -> object:
    """The sizes of a shape that is given by its name; anything else as it is."""
    if not isinstance(model, str):
        return model
    shape = dataclasses.replace(ModelShape.preset(model), name="custom")
    sizes = Sizes(**{name: value for name, value in vars(shape).items() if name in Sizes.model_fields})
    if sizes.shape() != shape:
        raise ValueError(f"model {model} has latent attention or dense layers among its experts: no suite builds it")
    return sizes


Model = Annotated[Sizes, BeforeValidator(_named)]


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
    etp: PositiveInt | None = None
    group: PositiveInt | None = None

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
        layout, model: parallel sizes and model sizes; the model also by the name of a shape that Steelyard ships.
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
        fixed_tokens: planning, bubbles: what one more micro-batch costs, as the linear work of so many tokens.
        fixed_cost: planning: ``given`` as ``fixed_tokens``, or ``calibrated`` on this machine before the first draw.
        exchange: planning: virtual stages exchange shapes in blocking calls, as Megatron's do.
        pass_ms: bubbles: milliseconds of the mean naive forward pass through one virtual stage.
        capacity_gib: handover, oom: memory of the GPU that is predicted for; where oom fails for real, the limit.
        recompute: throughput, handover, memory, oom: activations computed again in the backward pass, as
            ``predict_peak`` takes it.
        planners: planning: the others that take part (``suites.baselines.planners``); empty means all.
        device: ``cpu`` or ``cuda`` where the cell means something on that alone; None takes what is there.
        sides: a user's own sides by name, each ``module:function`` (see ``suites.sides``).
        axis: what tells the cell from others beside suite, workload, layout and role; part of its name.
        repeat: which of the repeats it is, from 1.
    """

    suite: str
    workload: str
    lengths_file: LengthsFile | None = None
    layout: Layout = Layout()
    model: Model
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
    fixed_cost: Literal["given", "calibrated"] = "given"
    exchange: bool = True
    pass_ms: PositiveFloat = 20.0
    capacity_gib: PositiveFloat = 80.0
    recompute: Literal["none", "selective", "full"] = "none"
    planners: list[str] = []
    device: Literal["cpu", "cuda"] | None = None
    sides: dict[str, str] = {}
    axis: str = ""
    repeat: PositiveInt = 1

    @property
    def id(self) -> str:
        """Short name, unique within a matrix, e.g. ``throughput/rl-code-16k-cap/dp2/actor``."""
        what: str = self.role
        if self.suite in NAMED_BY_ROWS:
            what = f"{self.rows}-rows" + (f"-fixed-{self.fixed_tokens:g}" if self.fixed_tokens else "")
        what += f"-{self.axis}" if self.axis else ""
        what += f"~{self.repeat}" if self.repeat > 1 else ""
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


# Settings of a cell that have an axis, or a meaning, of their own.
OWN_AXES = ("suite", "workload", "lengths_file", "layout", "role", "axis", "repeat")
SETTINGS = [name for name in Cell.model_fields if name not in OWN_AXES]


class Override(Strict):
    """Settings of the cells that ``when`` names."""

    when: dict[str, Any] = Field(min_length=1)
    settings: dict[str, Any] = Field(min_length=1)


class SuiteTable(Strict):
    """One ``[[suite]]`` of a matrix: the axes whose product gives its cells, and settings other than the defaults.

    ``rows`` is an axis where it is given, else a setting; ``axes`` makes an axis of any other setting.
    """

    name: str
    workloads: tuple[str, ...] = Field(min_length=1)
    layouts: tuple[Layout, ...] = Field(default=(Layout(),), min_length=1)
    roles: tuple[Literal["actor", "critic", "reward"], ...] = Field(default=("actor",), min_length=1)
    rows: tuple[PositiveInt, ...] = ()
    axes: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}
    repeats: PositiveInt = 1
    settings: dict[str, Any] = {}
    exclude: tuple[dict[str, Any], ...] = ()
    override: tuple[Override, ...] = ()

    def all_axes(self) -> dict[str, tuple[Any, ...]]:
        """The values of every axis, by the setting that each gives to a cell."""
        fixed = {"workload": self.workloads, "layout": self.layouts, "role": self.roles}
        return {**fixed, **({"rows": self.rows} if self.rows else {}), **self.axes}

    def label(self, point: Mapping[str, Any]) -> str:
        """What the name of a cell must say of its further axes."""
        parts = []
        for name in (*(() if self.name in NAMED_BY_ROWS or len(self.rows) < 2 else ("rows",)), *self.axes):
            value = point[name]
            # A table or a list has no short name: its place on the axis must do.
            text = str(value) if isinstance(value, str | int | float) else str(self.axes[name].index(value) + 1)
            parts.append(f"{name}-{text.replace('/', '-')}")
        return "-".join(parts)


class Matrix(Strict):
    """A whole matrix file; ``file`` is where it was read from."""

    name: str
    file: str
    description: str
    model: Model
    defaults: dict[str, Any] = {}
    suite: tuple[SuiteTable, ...] = Field(min_length=1)

    def cells(self, lengths_file: LengthsFile | None = None) -> list[Cell]:
        """Every cell, in the order of the file. ``lengths_file`` takes the place of every workload.

        Raises:
            InputError: a setting, an axis or a condition cannot be; the text names the file and the key.
        """
        cells: dict[str, Cell] = {}
        for number, table in enumerate(self.suite):
            for cell in _TableCells(self, f"suite.{number}", table, lengths_file).cells():
                if cell.id not in cells:
                    cells[cell.id] = cell
                elif lengths_file is None:
                    # With a lengths file, tables that differ in their workloads became the same: the first one counts.
                    self.refuse(f"suite.{number}", f"cell {cell.id} is there twice: remove one of the two")
        return list(cells.values())

    def refuse(self, key: str, why: str) -> NoReturn:
        raise InputError(f"matrix file {self.file}, key {key}: {why}") from None


@dataclass(frozen=True)
class _TableCells:
    """How one ``[[suite]]`` becomes cells; ``key`` is where it stands in its file."""

    matrix: Matrix
    key: str
    table: SuiteTable
    lengths_file: LengthsFile | None

    def cells(self) -> list[Cell]:
        axes = self.table.all_axes()
        for name in self.table.axes:
            if name in OWN_AXES or name not in Cell.model_fields:
                self.matrix.refuse(f"{self.key}.axes.{name}", f"is no setting of a cell{did_you_mean(name, SETTINGS)}")
        if self.lengths_file is not None:
            axes["workload"] = (Path(self.lengths_file.path).stem,)
        excluded = {f"{self.key}.exclude.{at}": when for at, when in enumerate(self.table.exclude)}
        overrides = {f"{self.key}.override.{at}": one for at, one in enumerate(self.table.override)}
        unused = {*excluded, *overrides}
        cells = []
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            out = {key for key, when in excluded.items() if self._matches(key, when, point)}
            more = {k: one.settings for k, one in overrides.items() if self._matches(f"{k}.when", one.when, point)}
            unused -= out | more.keys()
            if not out:
                cells += [self._cell(point, more, repeat) for repeat in range(1, self.table.repeats + 1)]
        if unused and self.lengths_file is None:
            self.matrix.refuse(min(unused), "fits no cell: remove it, or correct its condition")
        return cells

    def _matches(self, key: str, when: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
        for name, wanted in when.items():
            if name not in point:
                self.matrix.refuse(f"{key}.{name}", f"is no axis of this suite: it has {', '.join(point)}")
            if name == "layout":
                if not isinstance(wanted, dict) or not wanted or (wrong := wanted.keys() - Layout.model_fields.keys()):
                    sizes = ", ".join(Layout.model_fields)
                    what = f"{min(wrong)!r} is no size" if isinstance(wanted, dict) and wanted else "is no table"
                    self.matrix.refuse(f"{key}.layout", f"{what}: give some of {sizes}")
                if any(getattr(point["layout"], size) != value for size, value in wanted.items()):
                    return False
            elif point[name] not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        return True

    def _cell(self, point: dict[str, Any], overrides: Mapping[str, dict[str, Any]], repeat: int) -> Cell:
        sources = {"defaults": self.matrix.defaults, f"{self.key}.settings": self.table.settings}
        sources |= {f"{key}.settings": settings for key, settings in overrides.items()}
        settings: dict[str, Any] = {}
        origin = dict.fromkeys(point, f"{self.key}.axes")
        for key, source in sources.items():
            for name in source.keys() & {*OWN_AXES, *(() if key == "defaults" else point)}:
                self.matrix.refuse(
                    f"{key}.{name}", "belongs to an axis: use name, workloads, layouts, roles, rows or axes"
                )
            settings |= source
            origin |= dict.fromkeys(source.keys() - point.keys(), key)
        own = {"suite": self.table.name, "lengths_file": self.lengths_file, "repeat": repeat}
        own["axis"] = self.table.label(point)
        try:
            cell = Cell(**{"model": self.matrix.model, **settings, **point, **own})
        except ValidationError as error:
            where, why = _first_problem(error)
            self.matrix.refuse(f"{origin.get(where.split('.')[0], self.key)}.{where}", why)
        self._check(cell)
        return cell

    def _check(self, cell: Cell) -> None:
        """What pydantic cannot know: the workload exists, and the layout can hold the model and the rows."""
        if self.lengths_file is None:
            try:
                lengths.workload(cell.workload)
            except InputError as error:
                self.matrix.refuse(f"{self.key}.workloads", str(error))
        layout = f"{self.key}.layouts.{self.table.layouts.index(cell.layout)}"
        try:
            cell.layout.parallel().check(cell.model.shape())
        except InputError as error:
            self.matrix.refuse(layout, str(error))
        if cell.model.experts and cell.suite in DENSE:
            self.matrix.refuse(self.key, f"suite {cell.suite} weighs dense models only: give one without experts")
        if cell.rows % cell.layout.dp:
            self.matrix.refuse(
                layout,
                f"rows={cell.rows} must be a multiple of dp={cell.layout.dp}: the naive side gives every data-parallel "
                f"rank as many rows",
            )


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
        matrix = Matrix.model_validate({"name": path.stem, "file": str(path), **tomllib.loads(path.read_text())})
    except OSError as error:
        raise InputError(f"matrix file {path} cannot be read ({error.strerror}): check its permissions") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"matrix file {path} is not valid TOML: {error}") from None
    except ValidationError as error:
        where, why = _first_problem(error)
        raise InputError(f"matrix file {path}, key {where}: {why}") from None
    for number, table in enumerate(matrix.suite):
        if table.name not in suites:
            hint = did_you_mean(table.name, suites)
            matrix.refuse(
                f"suite.{number}.name", f"suite {table.name!r} does not exist{hint}: choose one of {', '.join(suites)}"
            )
    matrix.cells()
    return matrix


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The key and what is wrong with it."""
    first = error.errors()[0]
    got = "" if first["type"] == "missing" else f" (got {first['input']!r})"
    return ".".join(str(part) for part in first["loc"]), f"{first['msg']}{got}"
