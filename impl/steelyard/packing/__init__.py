"""Packing rows of different lengths into one sequence of tokens (THD), and back."""

from steelyard.packing.layout import PackedLayout
from steelyard.packing.pack import next_token_labels, pack, unpack

__all__ = ["PackedLayout", "next_token_labels", "pack", "unpack"]
