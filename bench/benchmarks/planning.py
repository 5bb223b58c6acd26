"""Plans of micro-batches: Steelyard's planner, or the work-balanced one that people ran (N4 of suites/baselines)."""

from __future__ import annotations

from .common import SIDE, Benchmark, by_profile, needs

RANKS, STAGES = 4, 4


class Planning(Benchmark):
    param_names = ("rows",)
    params = (by_profile([64], [128, 512], [128, 512, 2048]),)

    def setup(self, rows: int) -> None:
        pipelines, lengths = needs("steelyard.pipeline"), needs("steelyard.lengths")
        self.lengths = lengths.workload("rl-code-16k-cap").draw(rows, 7).totals
        self.max_tokens = -(-int(self.lengths.max()) // 256) * 256
        self.pipeline = pipelines.Pipeline(STAGES)
        self.simulate = pipelines.simulate
        if SIDE == "naive":
            from suites.baselines.planners import PLANNERS, Clock

            plain = self.lengths.tolist()
            self.plan = lambda: PLANNERS["N4"](plain, self.max_tokens, RANKS, self.pipeline, Clock())
        else:
            plan_step = needs("steelyard.balance").plan_step
            self.plan = lambda: [
                one.indices for one in plan_step(self.lengths, self.max_tokens, RANKS, pipeline=self.pipeline)
            ]

    def time_plan(self, rows: int) -> None:
        self.plan()

    def peakmem_plan(self, rows: int) -> None:
        self.plan()

    def track_micro_batches(self, rows: int) -> int:
        return max(len(rank) for rank in self.plan())

    track_micro_batches.unit = "micro-batches"

    def track_share_over_cap(self, rows: int) -> float:
        tokens = [int(self.lengths[part].sum()) for rank in self.plan() for part in rank if len(part)]
        return sum(one > self.max_tokens for one in tokens) / len(tokens)

    def track_rows_lost_or_doubled(self, rows: int) -> int:
        placed = sorted(row for rank in self.plan() for part in rank for row in part)
        return len(set(range(rows)) ^ set(placed)) + len(placed) - len(set(placed))

    track_rows_lost_or_doubled.unit = "rows"

    def track_predicted_time_over_ideal(self, rows: int) -> float:
        work = 24576.0 * self.lengths + self.lengths.astype(float) ** 2
        slowest = max(
            self.simulate([float(work[part].sum()) for part in rank], self.pipeline).makespan for rank in self.plan()
        )
        return slowest / (work.sum() / RANKS / STAGES * (1 + self.pipeline.backward))
