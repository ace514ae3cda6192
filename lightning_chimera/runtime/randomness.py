"""Random draws that depend on what is computed, not on where.

Every layer of every microbatch draws under a seed made from (seed, step, microbatch, layer), so any number of stages,
any schedule and any recomputation see the same dropout masks, and both copies of a stage in Chimera may serve any
microbatch. The global generators, from which data loaders draw, are put back afterwards.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_SPARE = np.random.MT19937(0)

States = tuple[torch.Tensor, Any, Any]
"""Of the generators of torch, numpy and random."""


def mix(*key: int) -> int:
    """Makes a 63-bit seed of some numbers; different numbers give unrelated seeds."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def reseed(mixed: int, layer: int) -> None:
    """Seeds torch's generators, on the CPU and on the accelerator, for a layer under a key that is mixed already."""
    _seed_torch(mixed ^ _of_layer(layer))


@cache
def _of_layer(layer: int) -> int:
    return mix(layer)


def _seed_torch(seed: int) -> None:
    """Seeds the CPU and CUDA; ``torch.manual_seed`` also keeps a stack trace for each other kind of device: 1 ms."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def seed(*key: int) -> None:
    """Seeds the global generators from a key: those of torch, numpy and random."""
    seed_by(mix(*key))


def seed_by(mixed: int) -> None:
    """The same from a key that is mixed already."""
    _seed_torch(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


@contextmanager
def preserved() -> Iterator[None]:
    """Puts the generators on the CPU back to where they were; that costs ten times as much as to seed them.

    That of an accelerator is not put back, since reading it would wait for the device, and no loader draws from it.
    """
    states = get_states()
    own = mtrand.get_bit_generator()
    # It takes longest to put numpy's numbers back, so another generator is drawn from meanwhile.
    mtrand.set_bit_generator(_SPARE)
    try:
        yield
    finally:
        mtrand.set_bit_generator(own)
        torch.set_rng_state(states[0])
        # Of two normal numbers that were drawn at once the second is lost where generators change.
        if own is _SPARE or states[1]["has_gauss"]:
            np.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def keyed(*key: int) -> Iterator[None]:
    """Runs code under generators seeded from a key, and puts them back (see :func:`preserved`)."""
    with preserved():
        seed(*key)
        yield


def get_states() -> States:
    """The states of the global generators on the CPU."""
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def set_states(states: States) -> None:
    """Puts the global generators on the CPU to where they were."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
