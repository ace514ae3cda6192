"""What a user's hooks ask of the whole model, of which each rank holds a part: parameters, norms, and clipping."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lightning_chimera.collectives import ReplicaCollectives
from lightning_chimera.runtime.meeting import meeting, met


class WholeModelCalls(ReplicaCollectives):
    """The part of a strategy that users call in mid-run; every rank makes each call, outside of a step."""

    @contextmanager
    def full_parameters(self, *, gradients: bool = False) -> Generator[None, None, None]:
        """Gives every rank the whole model for a while, for histograms, ``generate`` or an upload in mid-run.

        Every rank must enter it. What is changed inside is lost.

        Args:
            gradients: Whether the parameters have their gradients as well; if not, none of them has.
        """
        self._refuse_in_step("strategy.full_parameters()")
        with ExitStack() as stack:
            with meeting("strategy.full_parameters()"):
                stack.enter_context(self.engine.full_parameters(gradients=gradients))
            yield

    @met("strategy.grad_norm()")
    def grad_norm(self, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
        """What ``lightning.pytorch.utilities.grad_norm`` gives in a single process, equal on every rank.

        Every rank must call it, in a hook around the step (``on_before_optimizer_step``).

        Args:
            norm_type: The order of the norm; ``inf`` for the largest entry.
            group_separator: What is between the two parts of a name.

        Returns:
            The norm of each parameter's gradient, and of all together.
        """
        self._refuse_in_step("strategy.grad_norm()")
        order = float(norm_type)
        found = self.engine.gradient_norms(order)
        norms = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in found.items()}
        return {**norms, f"grad_{order}_norm_total": torch.stack(list(found.values())).norm(order)} if found else {}

    @met("strategy.clip_grad_norm()")
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does in a single process, in ``configure_gradient_clipping``.

        Every rank must call it.

        Args:
            max_norm: Gradients are scaled by one factor so that their norm is at most this.
            norm_type: The order of the norm; ``inf`` for the largest entry.
            parameters: Those whose gradients are looked at and scaled; all of the module by default.
            error_if_nonfinite: Whether a norm that is no number is an error.

        Returns:
            The norm before.
        """
        self._refuse_in_step("strategy.clip_grad_norm()")
        assert self.lightning_module is not None
        chosen = self.lightning_module.parameters() if parameters is None else parameters
        return self.engine.clip_gradients(chosen, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
