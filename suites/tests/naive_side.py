"""The naive side against the judge, on one rank: with all rows in one micro-batch, and with two rows in each."""

from suites import judging, reference
from suites.baselines import fixed_split
from suites.matrix import Cell
from suites.ranks import parallel_groups
from suites.weights import load


def against_the_judge(payload):
    cell = Cell.model_validate(payload)
    layout, options = cell.layout.parallel(), judging.LossOptions()
    with parallel_groups(layout, cell.seed):
        case = judging.make_case(cell, [options])
        verdict = case.verdicts[options]
        models = judging.build_models(cell, layout).plain
        found = {"judge": verdict.loss, "mean of means": _mean_of_means(cell, case, options)}
        for name, size in (("whole", cell.rows), ("split", cell.micro_batch_size)):
            load(models, case.weights, case.config)
            models[0].zero_grad_buffer()
            losses = fixed_split.forward_backward(case.batch, cell.role, models, size, temperature=judging.TEMPERATURE)
            gradient = judging.gradient_error(models, case, verdict).error
            found[name] = {"loss": sum(losses) / len(losses), "gradient": gradient}
        return found


def _mean_of_means(cell, case, options):
    rows = judging.judge_rows(case.batch)
    step = reference.actor_step if cell.role == "actor" else reference.critic_step
    settings = options.judge(cell.role, case.batch["responses"].size(1))
    size = cell.micro_batch_size
    losses = [step(case.weights, case.config, rows[at : at + size], settings).loss for at in range(0, len(rows), size)]
    return sum(losses) / len(losses)
