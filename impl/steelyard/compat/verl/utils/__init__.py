"""Mirror of ``verl.utils``, as far as Steelyard has something to put there."""
