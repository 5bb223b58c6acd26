"""Steelyard behind the names of other systems, so that they can use it without a change of their own code."""
