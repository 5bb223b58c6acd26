"""Padded rows into one sequence and back: Steelyard's packing, or the one with a host read per row (N6)."""

from __future__ import annotations

from .common import SIDE, Benchmark, by_profile, needs


class Packing(Benchmark):
    param_names = ("rows",)
    params = (by_profile([8], [16, 64], [16, 64, 256]),)

    def setup(self, rows: int) -> None:
        import numpy as np
        import torch

        torch.set_num_threads(1)
        packing = needs("steelyard.packing")
        sample = needs("steelyard.lengths").workload("rl-code-16k-cap").draw(rows, 7, scale=8.0)
        prompts, responses = int(sample.prompts.max()), int(sample.responses.max())
        columns, first = np.arange(prompts + responses), prompts - sample.prompts
        mask = (columns >= first[:, None]) & (columns < (prompts + sample.responses)[:, None])
        self.mask = torch.from_numpy(mask)
        self.ids = torch.randint(1, 1000, mask.shape, generator=torch.Generator().manual_seed(7)) * self.mask
        self.there_and_back = self._naive if SIDE == "naive" else self._optimised
        self.packing, self.totals, self.starts = packing, sample.totals, first

    def _optimised(self):
        layout = self.packing.PackedLayout.of(self.totals, starts=self.starts)
        return self.packing.unpack(self.packing.pack(self.ids, layout), layout, self.ids.size(1))

    def _naive(self):
        from suites.baselines import packing_syncs

        packed, offsets = packing_syncs.pack(self.ids, self.mask, tp=1, cp=1)
        return packing_syncs.unpack([packed], offsets, self.mask)

    def time_there_and_back(self, rows: int) -> None:
        self.there_and_back()

    def peakmem_there_and_back(self, rows: int) -> None:
        self.there_and_back()

    def track_wrong_tokens(self, rows: int) -> int:
        return int((self.there_and_back() != self.ids).sum())

    track_wrong_tokens.unit = "tokens"

    def track_host_reads(self, rows: int) -> int:
        reads = needs("steelyard.host_reads")
        with needs("steelyard.model.host").running_on("cpu"), reads.count_host_reads() as counted:
            self.there_and_back()
        return counted.total

    track_host_reads.unit = "reads"
