"""Naive steps on real ranks, their storages counted: what predictions of them are compared with."""

import gc
from functools import partial

from suites.baselines import fixed_split, whole_logits
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


def naive_step(name, layout, rows):
    """Fixed and padded micro-batches, or whole logits of packed ones, as ``predict_peak`` takes a step."""
    multiple = layout.tp if layout.sequence_parallel else 1
    step = {"fixed": partial(_fixed, rows), "whole logits": partial(whole_logits.step, micro_batch_size=rows)}[name]
    return partial(step, multiple_of=multiple)


def _fixed(rows, batch, models, optimizer, multiple_of):
    fixed_split.step(batch, "actor", models, optimizer, rows, multiple_of=multiple_of)


def peaks(payload):
    """The highest count of every rank in the second of two steps."""
    from steelyard.memory.record import Recorder
    from steelyard.model.build import build_model, build_optimizer
    from steelyard.parallel import ParallelLayout

    layout = ParallelLayout(**payload["layout"])
    shape, batch = shape_and_rows(payload)
    step = naive_step(payload["step"], layout, payload["size"])
    with parallel_groups(layout, 1), Recorder() as recorder:
        models = build_model(shape, layout)
        optimizer = build_optimizer(models, lr=1e-3)
        step(batch, models, optimizer)
        gc.collect()
        since = recorder.count
        step(batch, models, optimizer)
        return gather_to_all(recorder.peaks(since)["build"].bytes)
