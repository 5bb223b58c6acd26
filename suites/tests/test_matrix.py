"""Matrix files: what they mean, and that every mistake is named with its file and key."""

import pytest

import suites
from steelyard.errors import InputError, LengthsError
from suites import matrix
from suites.matrix import LengthsFile

MODEL = "[model]\nlayers = 4\nhidden = 32\nffn = 48\nheads = 4\nkv_heads = 2\nhead_dim = 8\nvocab = 96\n"
SUITE = '[[suite]]\nname = "throughput"\nworkloads = ["rl-math-short"]\n'


def load(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return matrix.load(str(file), list(suites.SUITES))


@pytest.mark.parametrize("name", matrix.names())
def test_every_shipped_matrix_is_valid_and_its_cells_have_names_of_their_own(name):
    cells = matrix.load(name, list(suites.SUITES)).cells()
    assert len({cell.id for cell in cells}) == len(cells) > 0


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
        ('description = "x"\n' + MODEL + SUITE + "settings = { rows = 0 }\n", "key rows: .*greater than 0.*got 0"),
        (
            'description = "x"\n' + MODEL + SUITE + "layouts = [{ tp = 3 }]\n",
            "tp=3 does not divide the model's 4 attention",
        ),
        ('description = "x"\n' + MODEL + SUITE + "layouts = [{ vpp = 2 }]\n", "vpp=2 needs pp > 1"),
        (
            'description = "x"\n' + MODEL + SUITE + "layouts = [{ dp = 2 }]\nsettings = { rows = 3 }\n",
            "rows=3 must be a multiple of dp=2",
        ),
        (
            'description = "x"\n' + MODEL + SUITE.replace("throughput", "thruput"),
            "suite 'thruput' does not exist .*throughput",
        ),
        ('description = "x"\n' + MODEL + SUITE + "layouts = [{}, {}]\n", "is there twice"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load(tmp_path, text)


def test_an_unknown_workload_and_an_unknown_matrix_are_named_with_what_is_close(tmp_path):
    with pytest.raises(LengthsError, match="rl-math-short"):
        load(tmp_path, 'description = "x"\n' + MODEL + SUITE.replace("rl-math-short", "rl-math-shirt"))
    with pytest.raises(InputError, match="matrix 'smok' does not exist .*smoke"):
        matrix.load("smok", list(suites.SUITES))
