"""A whole training step of an actor on one rank: Steelyard's, or fixed micro-batches of padded rows (N1, N5, N13)."""

from __future__ import annotations

import contextlib
import os
import tempfile

from .common import SIDE, Benchmark, by_profile, needs

MICRO_BATCH_SIZE = 4


class Step(Benchmark):
    param_names = ("rows",)
    params = (by_profile([4], [16], [16, 64]),)

    def setup(self, rows: int) -> None:
        import torch

        torch.set_num_threads(1)
        sample = needs("steelyard.lengths").workload("rl-code-16k-cap").draw(rows, 7, scale=48.0)
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(needs("steelyard.model.host").running_on("cpu"))
        self._join_group()
        from steelyard.cost import ModelShape
        from steelyard.model.build import build_model, build_optimizer, initialize_parallel
        from steelyard.parallel import ParallelLayout
        from suites.workloads import make_batch

        layout = ParallelLayout()
        shape = ModelShape(layers=4, hidden=128, ffn=384, heads=8, kv_heads=4, head_dim=16, vocab=1024)
        initialize_parallel(layout, seed=7)
        models = build_model(shape, layout, dtype=torch.float32)
        optimizer = build_optimizer(models, lr=1e-5)
        batch = make_batch(sample, shape.vocab, 7)
        if SIDE == "naive":
            from suites.baselines import fixed_split

            self.step = lambda: fixed_split.step(batch, "actor", models, optimizer, MICRO_BATCH_SIZE)
            return
        from steelyard.step import Actor, StepSettings

        budget = MICRO_BATCH_SIZE * int(sample.totals.max())
        actor = Actor(models, StepSettings(max_tokens=budget, layout=layout), optimizer)
        self.step = lambda: actor.update(batch)["actor/pg_loss"]

    def _join_group(self) -> None:
        import torch.distributed as dist

        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.stack.callback(dist.destroy_process_group)

    def teardown(self, rows: int) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        self.stack.close()

    def time_step(self, rows: int) -> None:
        self.step()

    def peakmem_step(self, rows: int) -> None:
        self.step()

    def track_first_loss(self, rows: int) -> float:
        """The same for every correct step; the naive side's mean of means is off."""
        return self.step()
