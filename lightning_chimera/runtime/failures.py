"""Whether all ranks have failed alike, asked without a collective: a rank that has not failed can't answer."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_chimera.runtime.blackboard import current_run

PATIENCE = timedelta(seconds=5)
"""How long a rank that has failed waits for the others to fail as well."""


def all_fail_alike(what: str) -> bool:
    """Whether every rank of the world says that the same has happened to it.

    It is bounded: ranks that say nothing are waited for a few seconds, and then can't be agreed with any more.

    Args:
        what: What has happened to this rank.
    """
    if not dist.is_initialized():
        return True
    keys = [f"chimera/failure/{current_run()}/{rank}" for rank in range(dist.get_world_size())]
    own = keys[dist.get_rank()]
    try:
        store = _get_default_store()
        store.set(own, what)
        store.wait(keys, PATIENCE)
        alike = len({store.get(key) for key in keys}) == 1
    except RuntimeError:  # of the store: a rank is late, or the one that keeps it has gone
        alike = False
    if not alike:
        with suppress(RuntimeError):
            store.set(own, "left")
    return alike
