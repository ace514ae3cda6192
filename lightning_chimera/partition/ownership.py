"""Which rank holds which parameter.

On the others a placeholder takes its place under its own name: optimizers and their parameter groups, module summaries
and checkpoints see the whole model on every rank, and nothing that is missing ever gets a gradient.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_chimera.partition.placeholder import Placeholder
from lightning_chimera.partition.stage import StageRunner

Ranks = tuple[int, ...]


class Ownership:
    """The holders of every parameter of a module.

    A parameter is held by the ranks of every stage that uses it, under any of its names, so a tied table lives on the
    ranks of the first and of the last stage; a parameter outside the HuggingFace model is held by all.

    Args:
        module: The user's module, whole.
        runner: Its stages.
        ranks_of: The ascending global ranks that hold any of some stages.
        rank: This global rank.
    """

    def __init__(
        self, module: nn.Module, runner: StageRunner, ranks_of: Callable[[Iterable[int]], Ranks], rank: int
    ) -> None:
        self._module = module
        self.rank = rank
        stages: dict[nn.Parameter, set[int]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            layer = runner.anatomy.layer_of(name)
            used = range(runner.num_stages) if layer is None else [runner.stage_of(layer)]
            stages.setdefault(parameter, set()).update(used)
        self.stages: dict[nn.Parameter, frozenset[int]] = {
            parameter: frozenset(used) for parameter, used in stages.items() if rank in ranks_of(sorted(used))
        }
        """The stages that use each parameter on this rank."""
        self.holders: dict[nn.Parameter, Ranks] = {
            parameter: ranks_of(sorted(used)) for parameter, used in stages.items()
        }
        # What takes the place of a parameter is never held here, so these stay.
        self._held = [parameter for parameter, ranks in self.holders.items() if rank in ranks]
        # By the parameter itself and not by its id, which another one may have as soon as it is gone.
        self._dropped: MutableMapping[Tensor, Placeholder] = WeakTensorKeyDictionary()

    def owner(self, parameter: nn.Parameter) -> int:
        """The global rank that counts a parameter where it must be counted once: its lowest holder."""
        return self.holders[parameter][0]

    def held(self) -> list[nn.Parameter]:
        """The parameters on this rank, in the order of the module."""
        return list(self._held)

    def holder_sets(self) -> set[Ranks]:
        """The distinct sets of holders."""
        return set(self.holders.values())

    def drop(self, device: torch.device) -> None:
        """Puts a placeholder in the place of every parameter that this rank does not hold.

        Args:
            device: What the placeholders answer where they are asked for theirs.
        """
        placeholders = {
            parameter: Placeholder(parameter, device)
            for parameter, ranks in self.holders.items()
            if self.rank not in ranks
        }
        self._replace(placeholders)
        self._dropped = WeakTensorKeyDictionary(placeholders)
        self.holders = {placeholders.get(parameter, parameter): ranks for parameter, ranks in self.holders.items()}

    def adopt(self, optimizer: Optimizer) -> None:
        """Exchanges parameters in an optimizer that was made before the module was cut.

        Raises:
            ValueError: It has a parameter that is none of the module's.
        """
        for group in optimizer.param_groups:
            group["params"] = [
                parameter if parameter in self.holders else self._dropped.get(parameter, parameter)
                for parameter in group["params"]
            ]
            strangers = sum(parameter not in self.holders for parameter in group["params"])
            if strangers:
                raise ValueError(
                    f"The optimizer has {strangers} parameters that are not the module's, so no rank of the pipeline"
                    " would hold them. Make it from self.parameters(), in configure_optimizers."
                )

    def fill(self, values: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, nn.Parameter]:
        """Puts real parameters in the place of placeholders; optimizers still know the placeholders.

        Returns:
            The placeholders by the parameters that have taken their places, for ``empty``.
        """
        real = {placeholder: nn.Parameter(value, placeholder.requires_grad) for placeholder, value in values.items()}
        for placeholder, parameter in real.items():
            attributes = {name: value for name, value in placeholder.__dict__.items() if name != "rank_device"}
            parameter.__dict__.update(attributes)
        self._replace(real)
        self.holders |= {parameter: self.holders[placeholder] for placeholder, parameter in real.items()}
        return {parameter: placeholder for placeholder, parameter in real.items()}

    def give(self, optimizer: Optimizer, filled: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Exchanges placeholders in an optimizer for what ``fill`` has put in their places, for good."""
        real = {placeholder: parameter for parameter, placeholder in filled.items()}
        for group in optimizer.param_groups:
            group["params"] = [real.get(parameter, parameter) for parameter in group["params"]]

    def empty(self, filled: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Takes back what ``fill`` has done."""
        self._replace(filled)
        for parameter in filled:
            del self.holders[parameter]

    def _replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Exchanges parameters under all their names."""
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in new:
                    module._parameters[name] = new[parameter]
