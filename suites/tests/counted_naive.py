"""The naive step on real ranks, its storages counted: what predictions of it are compared with."""

import gc

from suites.baselines import fixed_split
from suites.ranks import gather_to_all, parallel_groups


def shape_and_rows(payload):
    """The model and a batch with these rows; a prompt of one token, as predictions make them."""
    import torch

    from steelyard.cost import ModelShape

    lengths = torch.tensor(payload["lengths"])
    width = int(lengths.max())
    mask = (torch.arange(width) < lengths[:, None]).long()
    block = torch.zeros(len(lengths), width - 1)
    names = ("old_log_probs", "advantages", "values", "returns")
    return ModelShape(**payload["shape"]), {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": torch.zeros_like(mask[:, 1:]),
        "response_mask": mask[:, 1:].float(),
        **{name: block.clone() for name in names},
    }


def peaks(payload):
    """The highest count of every rank in the second of two steps."""
    from steelyard.memory.record import Recorder
    from steelyard.model.build import build_model, build_optimizer
    from steelyard.parallel import ParallelLayout

    layout = ParallelLayout(**payload["layout"])
    shape, batch = shape_and_rows(payload)
    multiple = layout.tp if layout.sequence_parallel else 1
    with parallel_groups(layout, 1), Recorder() as recorder:
        models = build_model(shape, layout)
        optimizer = build_optimizer(models, lr=1e-3)
        fixed_split.step(batch, "actor", models, optimizer, payload["size"], multiple_of=multiple)
        gc.collect()
        since = recorder.count
        fixed_split.step(batch, "actor", models, optimizer, payload["size"], multiple_of=multiple)
        return gather_to_all(recorder.peaks(since)["build"].bytes)
