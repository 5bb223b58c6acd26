"""Packing rows of different lengths into one sequence of tokens (THD), and back."""

from steelyard.packing.layout import PackedLayout
from steelyard.packing.pack import compact, expand, next_token_labels, pack, unpack, unpack_gathered

__all__ = ["PackedLayout", "compact", "expand", "next_token_labels", "pack", "unpack", "unpack_gathered"]
