"""What ``test_install.py`` runs in an interpreter of its own: every function here, and JSON of what each raised."""

import contextlib
import importlib
import json
import pickle
import sys
import traceback
import types
from pathlib import Path

import torch
import verl
import verl.utils.seqlen_balancing as theirs
from tensordict import TensorDict
from verl.utils import tensordict_utils

import steelyard.compat.verl as compat
from steelyard.compat.verl.models.mcore import util as packing
from steelyard.compat.verl.utils import memory_utils as memory
from steelyard.compat.verl.utils import seqlen_balancing as ours
from steelyard.errors import InputError

# The __init__ of these packages imports every engine and data set, and those need more than is installed here.
for path in ("workers.engine", "utils.dataset"):
    package = types.ModuleType(f"verl.{path}")
    package.__path__ = [str(Path(verl.__file__).parent.joinpath(*path.split(".")))]
    sys.modules[package.__name__] = package
engine = importlib.import_module("verl.workers.engine.utils")


def importer(name, *names):
    """A module that imports from verl's module by name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(f"from verl.utils.seqlen_balancing import {', '.join(names)}", vars(module))
    return module


@contextlib.contextmanager
def nothing_changes():
    before = dict(vars(theirs))
    yield
    assert all(vars(theirs)[name] is value for name, value in before.items())


def refusal():
    with nothing_changes():
        try:
            compat.install()
        except InputError as error:
            return str(error)
    raise AssertionError("installed")


def every_name_is_replaced_and_given_back():
    early = importer("early", "ceildiv as up", "karmarkar_karp")
    mine = types.ModuleType("mine")
    sys.modules["mine"] = mine
    mine.ceildiv = ours.ceildiv
    looked_at = (engine, theirs, early, mine, ours)
    before = {id(module): dict(vars(module)) for module in looked_at}

    places = compat.install()
    for name in ours.__all__:
        assert vars(theirs)[name].__wrapped__ is vars(ours)[name], name
        assert f"verl.utils.seqlen_balancing.{name}" in places
    assert engine.rearrange_micro_batches is theirs.rearrange_micro_batches
    assert engine.restore_dynamic_batch is theirs.restore_dynamic_batch
    assert early.up is theirs.ceildiv
    assert early.karmarkar_karp is theirs.karmarkar_karp
    assert {"early.up", "verl.workers.engine.utils.restore_dynamic_batch"} <= set(places)
    late = importer("late", "ceildiv")
    assert late.ceildiv is theirs.ceildiv

    compat.uninstall()
    for module in looked_at:
        now, then = vars(module), before[id(module)]
        assert list(now) == list(then)
        assert all(now[name] is then[name] for name in now), module
    assert late.ceildiv is before[id(theirs)]["ceildiv"]
    with nothing_changes():
        compat.uninstall()


def installing_twice_is_installing_once():
    original = theirs.ceildiv
    first = compat.install()
    late = importer("late", "ceildiv")
    with nothing_changes():
        assert compat.install() == sorted([*first, "late.ceildiv"])
    compat.uninstall()
    assert theirs.ceildiv is original is late.ceildiv
    assert compat.install() == sorted([*first, "late.ceildiv"])


def a_reloaded_module_can_be_installed_again():
    compat.install()
    late = importer("late", "ceildiv")
    importlib.reload(theirs)
    again = theirs.ceildiv
    assert again is not late.ceildiv
    compat.install()
    assert theirs.ceildiv is late.ceildiv
    compat.uninstall()
    assert theirs.ceildiv is again is late.ceildiv


def verls_own_engine_plans_with_steelyard():
    rows = [torch.arange(size) for size in (8, 7, 6, 5, 4)]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=5)
    tensordict_utils.assign_non_tensor(batch, max_token_len_per_gpu=15)
    assert len(engine.prepare_micro_batches(batch)[1]) == 3
    compat.install()
    micro_batches, indices = engine.prepare_micro_batches(batch)
    assert len(indices) == 2
    outputs = [{"model_output": {"ids": one["input_ids"]}} for one in micro_batches]
    restored = engine.postprocess_batch_func(outputs, indices, batch)["model_output"]["ids"]
    assert all(torch.equal(one, other) for one, other in zip(restored.unbind(), rows, strict=True))
    compat.uninstall()
    assert len(engine.prepare_micro_batches(batch)[1]) == 3


def verls_own_models_pack_with_steelyard():
    util, forward = (importlib.import_module(f"verl.models.mcore.{name}") for name in ("util", "model_forward"))
    replay = importlib.import_module("verl.utils.megatron.router_replay_utils")
    originals = {name: vars(util)[name] for name in packing.__all__}
    compat.install()
    for name in packing.__all__:
        assert vars(util)[name].__wrapped__ is vars(packing)[name], name
    for module in (forward, replay):
        assert module.preprocess_thd_engine is util.preprocess_thd_engine
        assert module.postprocess_packed_seqs is util.postprocess_packed_seqs
    compat.uninstall()
    assert all(vars(util)[name] is original for name, original in originals.items())
    assert forward.preprocess_thd_engine is replay.preprocess_thd_engine is originals["preprocess_thd_engine"]


def verls_workers_empty_the_cache_with_steelyard():
    util = importlib.import_module("verl.utils.memory_utils")
    originals = {name: vars(util)[name] for name in memory.__all__}
    late = types.ModuleType("late")
    late.aggressive_empty_cache = util.aggressive_empty_cache  # as verl.workers.engine_workers has it
    sys.modules["late"] = late
    compat.install()
    for name in memory.__all__:
        assert vars(util)[name].__wrapped__ is vars(memory)[name], name
    assert late.aggressive_empty_cache is util.aggressive_empty_cache
    compat.uninstall()
    assert all(vars(util)[name] is original for name, original in originals.items())


def stand_ins_travel_by_name():
    compat.install()
    sent = pickle.dumps(theirs.rearrange_micro_batches)
    assert pickle.loads(sent) is theirs.rearrange_micro_batches
    assert b"steelyard" not in sent


def another_version_is_refused():
    version, verl.__version__ = verl.__version__, "0.10.0"
    try:
        text = refusal()
    finally:
        verl.__version__ = version
    assert "verl 0.10.0 is installed but steelyard.compat.verl knows 0.9.1 only" in text, text


def a_changed_verl_is_refused():
    kept = theirs.roundup_divisible
    try:
        del theirs.roundup_divisible
        text = refusal()
        assert "holds nothing where verl 0.9.1 has roundup_divisible(a, b): this verl was changed" in text, text
        theirs.roundup_divisible = lambda a, b=1: a
        text = refusal()
        assert "holds roundup_divisible(a, b=1) where" in text, text
    finally:
        theirs.roundup_divisible = kept
    util = importlib.import_module("verl.models.mcore.util")
    kept = util.postprocess_bshd_engine
    try:
        util.postprocess_bshd_engine = lambda output, attention_mask, post_process=True, *, lengths=None: output
        text = refusal()
        assert "post_process=True, lengths=None) where verl 0.9.1 has" in text, text
        assert "postprocess_bshd_engine(output, attention_mask, post_process=True): this verl was changed" in text, text
    finally:
        util.postprocess_bshd_engine = kept


SCENARIOS = (
    every_name_is_replaced_and_given_back,
    installing_twice_is_installing_once,
    verls_own_engine_plans_with_steelyard,
    verls_own_models_pack_with_steelyard,
    verls_workers_empty_the_cache_with_steelyard,
    stand_ins_travel_by_name,
    another_version_is_refused,
    a_changed_verl_is_refused,
    a_reloaded_module_can_be_installed_again,
)


def main():
    raised = {}
    for scenario in SCENARIOS:
        try:
            scenario()
            raised[scenario.__name__] = ""
        except Exception:
            raised[scenario.__name__] = traceback.format_exc()
        finally:
            compat.uninstall()
            for name in ("early", "late", "mine"):
                sys.modules.pop(name, None)
    print(json.dumps(raised))


if __name__ == "__main__":
    main()
