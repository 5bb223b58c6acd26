"""The memory predictor; there is no naive side."""

from __future__ import annotations

from .common import Benchmark, by_profile, needs, without_naive_side

GIB = 2**30


class Prediction(Benchmark):
    param_names = ("model, layers, tokens",)
    params = (
        by_profile(
            ["qwen2.5-0.5b, 2, 1024"],
            ["qwen2.5-0.5b, 4, 16384"],
            ["qwen2.5-0.5b, 24, 16384", "qwen2.5-7b, 4, 65536"],
        ),
    )

    def setup(self, size: str) -> None:
        from dataclasses import replace

        without_naive_side()
        predict = needs("steelyard.memory.predict")
        model, layers, tokens = size.split(", ")
        shape = replace(needs("steelyard.cost").ModelShape.preset(model), layers=int(layers))
        layout = needs("steelyard.parallel").ParallelLayout()
        self.predict = lambda: predict.predict_peak(shape, layout, [[int(tokens)]] * 2)

    def time_predict(self, size: str) -> None:
        self.predict()

    def peakmem_predict(self, size: str) -> None:
        self.predict()

    def track_predicted_peak(self, size: str) -> int:
        return self.predict().peak_bytes

    track_predicted_peak.unit = "bytes"

    def track_static_bytes_per_parameter(self, size: str) -> float:
        """bf16 parameters, fp32 gradients, fp32 master copy and two moments on one rank: 18."""
        found = self.predict()
        return found.static_bytes / found.parameters
