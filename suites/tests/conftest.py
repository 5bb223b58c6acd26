"""What several tests of this folder need."""

import pytest
import torch.distributed as dist

from steelyard.model import host


@pytest.fixture
def one_rank():
    """A process group of this process alone, on the CPU."""
    with host.running_on("cpu"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
