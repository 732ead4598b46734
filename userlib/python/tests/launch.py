# SPDX-License-Identifier: MIT OR Apache-2.0
"""torchrun, also where torch was built without libuv.

    launch.py --standalone --nproc-per-node 4 SCRIPT ARGUMENT...

Debian's torch 2.6 is built so, and its torchrun can not begin: the store of its rendezvous, and the workers' way to it, ask for libuv whatever USE_LIBUV says.
"""

import os

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as rendezvous


def has_libuv() -> bool:
    """Whether a store on libuv can be made."""
    try:
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError:
        return False
    return True


def plain_store(*arguments, **named) -> dist.TCPStore:
    """A store that needs no libuv."""
    return dist.TCPStore(*arguments, **named, use_libuv=False)


if __name__ == "__main__":
    if not has_libuv():
        rendezvous.TCPStore = plain_store
        # The workers make a store of their own; that one asks for libuv only where it is wanted.
        os.environ |= {"USE_LIBUV": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run.main()
