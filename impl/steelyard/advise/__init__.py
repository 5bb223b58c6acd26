"""Which settings fit a number of GPUs, how fast they are, and what one change would do."""

from steelyard.advise.job import Job
from steelyard.advise.machine import GPUS, Gpu, gpu_named
from steelyard.advise.memory import Fit, check
from steelyard.advise.setting import Setting

__all__ = ["GPUS", "Fit", "Gpu", "Job", "Setting", "check", "gpu_named"]
