"""Which rank holds which parameter, and placeholders for the ones it does not hold.

A placeholder is a parameter on the meta device under the original's name: optimizers and their parameter groups, module
summaries and checkpoints see the whole model on every rank, and nothing that is missing ever gets a gradient.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

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
        self.holders: dict[nn.Parameter, Ranks] = {
            parameter: ranks_of(sorted(used)) for parameter, used in stages.items()
        }

    def owner(self, parameter: nn.Parameter) -> int:
        """The global rank that counts a parameter where it must be counted once: its lowest holder."""
        return self.holders[parameter][0]

    def held(self) -> list[nn.Parameter]:
        """The parameters on this rank, in the order of the module."""
        return [parameter for parameter, ranks in self.holders.items() if self.rank in ranks]

    def holder_sets(self) -> set[Ranks]:
        """The distinct sets of holders."""
        return set(self.holders.values())

    def drop(self) -> None:
        """Puts a placeholder in the place of every parameter that this rank does not hold."""
        placeholders = {
            parameter: nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for parameter, ranks in self.holders.items()
            if self.rank not in ranks
        }
        self._replace(placeholders)
        self.holders = {placeholders.get(parameter, parameter): ranks for parameter, ranks in self.holders.items()}

    def fill(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Puts real parameters in the place of placeholders; optimizers still know the placeholders."""
        real = {placeholder: nn.Parameter(value, placeholder.requires_grad) for placeholder, value in values.items()}
        self._replace(real)
        self.holders |= {parameter: self.holders[placeholder] for placeholder, parameter in real.items()}

    def _replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Exchanges parameters under all their names."""
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in new:
                    module._parameters[name] = new[parameter]
