"""What the launcher's tests run on ranks: one function per way in which a rank can end."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from steelyard.errors import InputError


def add_up(payload):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return {"sum": total.item(), "threads": torch.get_num_threads(), "payload": payload}


def fail_on_rank_one(payload):
    if dist.get_rank() == 1:
        raise ZeroDivisionError("planted")
    dist.barrier()


def refuse(payload):
    raise InputError("rows=3 is odd: use an even number")


def leave_with_code(payload):
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def die_by_signal(payload):
    if dist.get_rank() == 0:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stand_still_here(payload):
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()
