"""The pipeline simulator, and the search for an order; there is no naive side."""

from __future__ import annotations

from .common import Benchmark, by_profile, needs, without_naive_side

DRAW = 7


class Simulation(Benchmark):
    param_names = ("stages, chunks, micro-batches",)
    params = (by_profile(["4, 2, 32"], ["4, 2, 64", "16, 4, 512"], ["4, 2, 64", "16, 4, 512", "32, 4, 2048"]),)

    def setup(self, size: str) -> None:
        import numpy as np

        without_naive_side()
        self.pipelines = needs("steelyard.pipeline")
        stages, chunks, self.count = map(int, size.split(","))
        self.pipeline = self.pipelines.Pipeline(stages, chunks)
        self.work = np.random.default_rng(DRAW).uniform(0.2, 2.0, self.count)
        self.closed_form = (stages - 1) / (self.count * chunks)

    def time_simulate(self, size: str) -> None:
        self.pipelines.simulate(self.work, self.pipeline)

    def peakmem_simulate(self, size: str) -> None:
        self.pipelines.simulate(self.work, self.pipeline)

    def track_predicted_overhead(self, size: str) -> float:
        return self.pipelines.simulate(self.work, self.pipeline).overhead

    def track_error_of_equal_micro_batches(self, size: str) -> float:
        return abs(self.pipelines.simulate([1.0] * self.count, self.pipeline).overhead - self.closed_form)
