"""ZB-H1 and ZB-H2: 1F1B whose weight gradients fill the bubbles.

Four stages, five microbatches; forward, input gradient and weight gradient take one unit of time each.

ZB-H1 keeps the warm-up of 1F1B and holds what its first rank holds, D microbatches on D ranks; weight gradients wait
until nothing else can run or that many are held. A rank idles for (D - 1)(F + I - W):

    rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4
    rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4
    rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4

ZB-H2 warms up with 2 (D - r) - 1 forwards on rank r and holds 2D - 1 microbatches, until their weight gradients have
run. No rank idles between its first and its last action; counted from flush to flush, as here, a rank idles for
(D - 1) F, before it or after it:

    rank 0  F0 F1 F2 F3 F4 .  .  I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .
    rank 1  .  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    rank 2  .  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

See Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Schedule, check_counts
from lightning_chimera.schedules.one_f_one_b import one_f_one_b, one_f_one_b_pb
from lightning_chimera.schedules.split import fill


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: the memory of 1F1B, a third of its bubble.

    Raises:
        ValueError: if there is no stage or no microbatch.
    """
    check_counts("zb_h1", num_stages, num_microbatches)
    return fill(one_f_one_b(num_stages, num_microbatches), "zb_h1", num_stages)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the ZB-H2 schedule: twice the memory of 1F1B, and no idle time between a rank's first and last action.

    Raises:
        ValueError: if there is no stage or no microbatch.
    """
    check_counts("zb_h2", num_stages, num_microbatches)
    return fill(one_f_one_b_pb(num_stages, num_microbatches), "zb_h2", 2 * num_stages - 1)
