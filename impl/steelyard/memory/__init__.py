"""What a step holds in memory."""

from steelyard.memory.live import LiveBytes

__all__ = ["LiveBytes"]
