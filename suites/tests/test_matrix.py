"""Matrix files: what they mean, and that every mistake is named with its file and key."""

import dataclasses

import pytest

import suites
from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.pipeline import Pipeline, legal_count
from suites import bubbles, matrix, parity
from suites.matrix import LengthsFile

MODEL = "[model]\nlayers = 4\nhidden = 32\nffn = 48\nheads = 4\nkv_heads = 2\nhead_dim = 8\nvocab = 96\n"
SUITE = '[[suite]]\nname = "throughput"\nworkloads = ["rl-math-short"]\n'
HEAD = 'description = "x"\n' + MODEL
OVERRIDE = "override = [{ when = { role = 'ROLE' }, settings = { pairs = 0 } }]\n"


def load(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return matrix.load(str(file), list(suites.SUITES))


@pytest.mark.parametrize("name", matrix.names())
def test_every_shipped_matrix_is_valid_and_its_cells_have_names_of_their_own(name):
    cells = matrix.load(name, list(suites.SUITES)).cells()
    assert len({cell.id for cell in cells}) == len(cells) > 0
    for cell in cells:
        check_legal(cell)


def check_legal(cell):
    """The rows of a cell exist, and its suite has micro-batches of them that the cell's schedule takes."""
    layout, rows = cell.layout.parallel(), len(cell.draw())
    assert rows == cell.rows
    if cell.suite == "bubbles":
        bubbles.Task.of(cell)
    elif cell.suite == "parity":
        for budget in parity.BUDGETS:
            parity._fixed_size(rows // layout.dp, budget, cell)
    elif cell.suite == "throughput" and layout.pp > 1:
        count = -(-rows // layout.dp // cell.micro_batch_size)
        assert legal_count(count, Pipeline(layout.pp, layout.vpp, layout.group)) == count, cell.id
    elif cell.suite == "memory":
        assert layout.world == 1
    longest = int(cell.draw().totals.max())
    assert cell.suite in ("bubbles", "planning", "packing") or longest <= cell.model.max_positions, cell.id


def test_a_model_may_be_named(tmp_path):
    text = HEAD.replace(MODEL, 'model = "qwen2.5-7b"\n') + SUITE.replace("throughput", "oom")
    first, second = load(tmp_path, text + 'axes = { model = ["qwen3-30b-a3b", "qwen2.5-0.5b"] }\n').cells()
    assert first.model.shape() == dataclasses.replace(ModelShape.preset("qwen3-30b-a3b"), name="custom")
    assert (second.model.layers, second.model.tied) == (24, True)
    assert first.id.endswith("actor-model-qwen3-30b-a3b")
    (cell,) = load(tmp_path, text).cells()
    assert (cell.model.layers, cell.model.experts) == (28, 0)
    assert matrix.Cell.model_validate(first.model_dump(mode="json")) == first, "as it travels to where it runs"


def test_experts_are_spread_over_their_own_ranks(tmp_path):
    text = HEAD.replace(MODEL, 'model = "qwen3-30b-a3b"\n') + SUITE.replace("throughput", "oom")
    (cell,) = load(tmp_path, text + "layouts = [{ tp = 2, dp = 8, ep = 4, etp = 1 }]\n").cells()
    assert cell.id.split("/")[2] == "tp2+sp-dp8-ep4-etp1"
    assert (cell.layout.parallel().ep, cell.layout.parallel().etp) == (4, 1)
    with pytest.raises(InputError, match="key suite.0.layouts.0: ep=3 does not divide the model's 128 experts"):
        load(tmp_path, text + "layouts = [{ dp = 9, ep = 3 }]\nsettings = { rows = 9 }\n")


def test_an_axis_takes_the_place_of_a_default(tmp_path):
    text = HEAD + "[defaults]\ndtype = 'bfloat16'\n" + SUITE + "axes = { dtype = ['float32', 'bfloat16'] }\n"
    assert [cell.dtype for cell in load(tmp_path, text).cells()] == ["float32", "bfloat16"]


def test_a_suite_is_the_product_of_its_axes_and_overrides_the_defaults(tmp_path):
    text = 'description = "x"\n' + MODEL + "[defaults]\nrows = 8\npairs = 2\n" + SUITE
    text += 'layouts = [{}, { tp = 2 }, { dp = 2 }]\nroles = ["actor", "critic"]\nsettings = { pairs = 3 }\n'
    cells = load(tmp_path, text).cells()
    assert [cell.id for cell in cells][:3] == [
        "throughput/rl-math-short/1/actor",
        "throughput/rl-math-short/1/critic",
        "throughput/rl-math-short/tp2+sp/actor",
    ]
    assert len(cells) == 6
    assert all((cell.rows, cell.pairs) == (8, 3) for cell in cells)


def test_any_setting_can_be_an_axis_and_cells_can_be_repeated(tmp_path):
    text = HEAD + SUITE + "rows = [4, 8]\naxes = { pairs = [1, 2], dtype = ['float32'] }\nrepeats = 2\n"
    cells = load(tmp_path, text).cells()
    assert [cell.id.rpartition("/")[2] for cell in cells][:4] == [
        "actor-rows-4-pairs-1-dtype-float32",
        "actor-rows-4-pairs-1-dtype-float32~2",
        "actor-rows-4-pairs-2-dtype-float32",
        "actor-rows-4-pairs-2-dtype-float32~2",
    ]
    assert [(cell.rows, cell.pairs, cell.repeat) for cell in cells[:5:2]] == [(4, 1, 1), (4, 2, 1), (8, 1, 1)]
    assert len(cells) == 8


def test_exclusions_and_overrides_fit_by_axis(tmp_path):
    text = HEAD + SUITE + 'layouts = [{}, { dp = 2 }, { tp = 2, dp = 2 }]\nroles = ["actor", "critic", "reward"]\n'
    text += 'exclude = [{ layout = { dp = 2 }, role = ["critic", "reward"] }]\n'
    text += "override = [{ when = { layout = { dp = 2 } }, settings = { pairs = 7, time_limit = 9 } }"
    text += ", { when = { layout = { tp = 2 } }, settings = { pairs = 8 } }]\n"
    found = {cell.id.split("/", 2)[2]: (cell.pairs, cell.time_limit) for cell in load(tmp_path, text).cells()}
    assert found == {
        "1/actor": (5, 300.0),
        "1/critic": (5, 300.0),
        "1/reward": (5, 300.0),
        "dp2/actor": (7, 9.0),
        "tp2+sp-dp2/actor": (8, 9.0),
    }


def test_a_lengths_file_takes_the_place_of_the_workloads(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("p,r\n100,20\n50,7\n")
    own = LengthsFile(path=str(file), prompt_column="p", response_column="r")
    (cell,) = load(tmp_path, 'description = "x"\n' + MODEL + SUITE + "settings = { rows = 4 }\n").cells(own)
    assert cell.workload == "lengths"
    twice = SUITE + SUITE.replace("rl-math-short", "rl-code-16k-cap") + "settings = { rows = 4 }\n"
    (first,) = load(tmp_path, 'description = "x"\n' + MODEL + twice).cells(own)
    assert first.rows == 16, "tables that differ in their workloads alone become one cell"
    pairs = set(zip(cell.draw().prompts.tolist(), cell.draw().responses.tolist(), strict=True))
    assert pairs == {(100, 20), (50, 7)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("description = ", "is not valid TOML"),
        ('description = "x"\n' + MODEL, "key suite: Field required"),
        ('description = "x"\n' + MODEL + SUITE + "sise = 3\n", "key suite.0.sise: Extra inputs"),
        (
            'description = "x"\n' + MODEL + SUITE + "settings = { rows = 0 }\n",
            "mine.toml, key suite.0.settings.rows: .*greater than 0.*got 0",
        ),
        (
            'description = "x"\n' + MODEL + SUITE + "layouts = [{ tp = 3 }]\n",
            "key suite.0.layouts.0: .*tp=3 does not divide the model's 4 attention",
        ),
        ('description = "x"\n' + MODEL + SUITE + "layouts = [{ vpp = 2 }]\n", "vpp=2 needs pp > 1"),
        (
            'description = "x"\n' + MODEL + SUITE + "layouts = [{ dp = 2 }]\nsettings = { rows = 3 }\n",
            "rows=3 must be a multiple of dp=2",
        ),
        (
            'description = "x"\n' + MODEL + SUITE.replace("throughput", "thruput"),
            "key suite.0.name: suite 'thruput' does not exist .*throughput",
        ),
        ('description = "x"\n' + MODEL + SUITE + "layouts = [{}, {}]\n", "key suite.0: cell .* is there twice"),
        (HEAD + "[defaults]\nrows = 0\n" + SUITE, "key defaults.rows: .*greater than 0"),
        (HEAD + SUITE + "axes = { sise = [1] }\n", "key suite.0.axes.sise: is no setting of a cell"),
        (HEAD + SUITE + "axes = { role = ['actor'] }\n", "key suite.0.axes.role: is no setting"),
        (HEAD + SUITE + "axes = { rows = [] }\n", "key suite.0.axes.rows: "),
        (HEAD + SUITE + "axes = { pairs = [1, 0] }\n", "key suite.0.axes.pairs: .*greater than 0"),
        (HEAD + SUITE + "axes = { pairs = [1] }\nsettings = { pairs = 2 }\n", "settings.pairs: belongs to an axis"),
        (HEAD + SUITE + "repeats = 0\n", "key suite.0.repeats: "),
        (
            HEAD + SUITE + "exclude = [{ rowz = 4 }]\n",
            "key suite.0.exclude.0.rowz: is no axis of this suite: it has work",
        ),
        (HEAD + SUITE + "exclude = [{ layout = { tq = 2 } }]\n", "key suite.0.exclude.0.layout: 'tq' is no size"),
        (HEAD + SUITE + "exclude = [{ role = 'critic' }]\n", "key suite.0.exclude.0: fits no cell"),
        (HEAD + SUITE + OVERRIDE.replace("ROLE", "critic"), "key suite.0.override.0: fits no cell"),
        (HEAD.replace(MODEL, "model = 'qwen2.5-8b'\n") + SUITE, "key model: .*unknown model preset 'qwen2.5-8b' .did"),
        (HEAD.replace(MODEL, "model = 'deepseek-v3'\n") + SUITE, "key model: .*deepseek-v3 has latent attention"),
        (HEAD.replace(MODEL, MODEL + "experts = 4\n") + SUITE, "key model: .*experts_per_token=0 must be 1 to experts"),
        (
            HEAD + SUITE.replace("throughput", "parity") + "settings = { model = 'qwen3-30b-a3b' }\n",
            "key suite.0: suite parity weighs dense models only",
        ),
        (HEAD + SUITE + OVERRIDE.replace("ROLE", "actor"), "key suite.0.override.0.settings.pairs: .*greater than 0"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load(tmp_path, text)


def test_an_unknown_workload_and_an_unknown_matrix_are_named_with_what_is_close(tmp_path):
    with pytest.raises(InputError, match="key suite.0.workloads: .*rl-math-short"):
        load(tmp_path, 'description = "x"\n' + MODEL + SUITE.replace("rl-math-short", "rl-math-shirt"))
    with pytest.raises(InputError, match="matrix 'smok' does not exist .*smoke"):
        matrix.load("smok", list(suites.SUITES))
