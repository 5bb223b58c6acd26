"""What the launcher's tests run on ranks: one function per way in which a rank can end."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from steelyard.errors import InputError
from suites.launch.local import run_ranks


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


def start_a_sleeper(payload):
    return subprocess.Popen(["sleep", "600"]).pid


def sessions_of_cell_and_ranks(payload):
    return [os.getsid(0), *run_ranks("suites.tests.rank_jobs:sessions", 2, None, time_limit=60, device="cpu")]


def sessions(payload):
    ids = [None] * dist.get_world_size()
    dist.all_gather_object(ids, os.getsid(0))
    return ids


def leave_a_file_and_die(payload):
    _, name = tempfile.mkstemp()
    Path(payload).write_text(name)
    os.kill(os.getpid(), signal.SIGKILL)


def allocate_too_much(payload):
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
        torch.zeros(2**34)
    dist.barrier()


def grow_in_group(payload):
    if dist.get_rank() == 1:
        Path(payload).write_text(str(os.getpid()))
        bytearray(500_000_000)
    dist.barrier()
