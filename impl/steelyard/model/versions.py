"""What differs between the versions of megatron-core that are supported, 0.16 to 0.19, in one place.

Everything else is written so that it holds for all of them: fields of configurations are read from their classes.
"""

from __future__ import annotations

# Fields of the DDP configuration that DDP never reads, and what does. (0.19)
UNREAD_BY_DDP = {"num_buckets": "Megatron-LM's own training loop alone makes bucket_size of it: set bucket_size"}
