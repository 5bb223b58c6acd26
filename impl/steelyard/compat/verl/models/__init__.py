"""Mirror of ``verl.models``, as far as Steelyard has something to put there."""
