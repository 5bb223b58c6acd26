"""What a step holds in memory, and how it is given back."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from steelyard.memory.allocator import Event, Moment, OutOfMemory, Replay, replay
from steelyard.memory.allocator_settings import AllocatorSettings, Allowances
from steelyard.memory.cache import (
    EmptyCacheReport,
    MemoryInfo,
    PeakMemory,
    aggressive_empty_cache,
    memory_info,
    peak_memory,
    reset_peak,
)
from steelyard.memory.handover import HandOver, Way, hand_over
from steelyard.memory.live import LiveBytes
from steelyard.memory.offload import Moved, Offloader, PieceState
from steelyard.memory.snapshot import Recording, SnapshotComparison, compare_snapshot, from_snapshot

if TYPE_CHECKING:
    from steelyard.memory.predict import MemoryPrediction, predict_peak
    from steelyard.memory.threshold import Threshold, largest_response

__all__ = [
    "AllocatorSettings",
    "Allowances",
    "EmptyCacheReport",
    "Event",
    "HandOver",
    "LiveBytes",
    "MemoryInfo",
    "MemoryPrediction",
    "Moment",
    "Moved",
    "Offloader",
    "OutOfMemory",
    "PeakMemory",
    "PieceState",
    "Recording",
    "Replay",
    "SnapshotComparison",
    "Threshold",
    "Way",
    "aggressive_empty_cache",
    "compare_snapshot",
    "from_snapshot",
    "hand_over",
    "largest_response",
    "memory_info",
    "peak_memory",
    "predict_peak",
    "replay",
    "reset_peak",
]

# Predictions import megatron-core's models, which takes seconds: only who asks for them pays.
_PREDICTIONS = {
    "MemoryPrediction": "predict",
    "predict_peak": "predict",
    "Threshold": "threshold",
    "largest_response": "threshold",
}


def __getattr__(name: str) -> Any:
    if name not in _PREDICTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PREDICTIONS[name]}"), name)
