"""The naive side against the judge, on one rank: with all rows in one micro-batch, and with two rows in each."""

from suites import judging, reference
from suites.baselines import fixed_split
from suites.matrix import Cell
from suites.ranks import parallel_groups


def against_the_judge(payload):
    cell = Cell.model_validate(payload)
    layout = cell.layout.parallel()
    with parallel_groups(layout, cell.seed):
        case = judging.make_case(cell)
        found = {"judge": case.verdict.loss, "mean of means": _mean_of_means(cell, case)}
        for name, size in (("whole", cell.rows), ("split", cell.micro_batch_size)):
            models = judging.build(cell, case, layout, distributed=False)
            losses = fixed_split.forward_backward(case.batch, cell.role, models, size)
            gradient = judging.gradient_error(models, case).error
            found[name] = {"loss": sum(losses) / len(losses), "gradient": gradient}
        return found


def _mean_of_means(cell, case):
    rows = judging.judge_rows(case.batch)
    step, settings = {
        "actor": (reference.actor_step, reference.ActorSettings()),
        "critic": (reference.critic_step, reference.CriticSettings()),
    }[cell.role]
    size = cell.micro_batch_size
    losses = [step(case.weights, case.config, rows[at : at + size], settings).loss for at in range(0, len(rows), size)]
    return sum(losses) / len(losses)
