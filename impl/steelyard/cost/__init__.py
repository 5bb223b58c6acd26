"""What a sequence and a micro-batch cost: the shape of a model, and the forward work its lengths cause."""

from steelyard.cost.calibration import Calibration
from steelyard.cost.sequence import SequenceCost
from steelyard.cost.shape import ModelShape, presets

__all__ = ["Calibration", "ModelShape", "SequenceCost", "presets"]
