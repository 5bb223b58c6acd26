"""verl's own ``rearrange_micro_batches`` as a side of the planning suite, by the installed version of verl:

python -m bench run --matrix planning --only 'planning/rl-code-16k-cap/*' --side verl=suites.examples.verl_planner:plan
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    rearrange_micro_batches,
)

from suites.baselines.planners import RefusedError
from suites.sides import planner


@planner
def plan(lengths, max_tokens, ranks, pipeline, clock):
    work = calculate_workload(torch.tensor(lengths)).tolist()
    hands = get_seqlen_balanced_partitions(work, ranks, equal_size=True)
    # Virtual stages want a multiple of their group, as verl's Megatron worker asks for it.
    multiple = pipeline.group_size if pipeline and pipeline.virtual > 1 else None

    def one_rank(rows, at_least=None):
        # Only the sums of the mask are read: a column of lengths stands for it.
        tokens = torch.tensor([[lengths[row]] for row in rows])
        batch = TensorDict({"input_ids": tokens, "attention_mask": tokens}, batch_size=[len(rows)])
        _, parts = rearrange_micro_batches(
            batch, max_tokens, num_batches_divided_by=multiple, min_num_micro_batch=at_least
        )
        return [[rows[at] for at in part] for part in parts]

    try:
        plans = clock.on_ranks(one_rank, hands)
        # Every rank must have as many; verl agrees on it with an all-reduce.
        most = max(map(len, plans))
        return plans if min(map(len, plans)) == most else clock.on_ranks(lambda rows: one_rank(rows, most), hands)
    except (AssertionError, ValueError) as error:
        raise RefusedError(str(error)) from None
