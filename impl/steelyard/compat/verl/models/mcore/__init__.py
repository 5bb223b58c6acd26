"""Mirror of ``verl.models.mcore``, as far as Steelyard has something to put there."""
