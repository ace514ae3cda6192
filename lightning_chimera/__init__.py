"""Pipeline parallelism for unchanged LightningModules.

Importing the package registers the strategies ``chimera``, ``chimera_gpipe`` and ``chimera_1f1b``::

    import lightning as L
    import lightning_chimera

    L.Trainer(strategy="chimera", devices=4).fit(module, datamodule)
"""

import sys
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning_chimera.launch import leave_job
    from lightning_chimera.partition.anatomy import Family, register_family
    from lightning_chimera.strategy import ChimeraStrategy

__all__ = ["ChimeraStrategy", "Family", "leave_job", "register_family"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads the public names, and with them transformers, only when they are used."""
    if name == "ChimeraStrategy":
        from lightning_chimera.strategy import ChimeraStrategy

        return ChimeraStrategy
    if name == "leave_job":
        from lightning_chimera.launch import leave_job

        return leave_job
    if name in ("Family", "register_family"):
        from lightning_chimera.partition import anatomy

        return getattr(anatomy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _strategy(**kwargs: Any) -> "ChimeraStrategy":
    """Builds the strategy for Lightning's registry."""
    from lightning_chimera.strategy import ChimeraStrategy

    return ChimeraStrategy(**kwargs)


for _name, _schedule in (("chimera", "chimera"), ("chimera_gpipe", "gpipe"), ("chimera_1f1b", "1f1b")):
    StrategyRegistry.register(
        _name,
        _strategy,
        description=f"Pipeline parallelism by the {_schedule} schedule",
        override=True,
        schedule=_schedule,
    )


def _refuse(**_: Any) -> None:
    """Says which Trainer knows the strategy.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "strategy='chimera' was given to a Trainer of pytorch_lightning. lightning_chimera is for `lightning` alone,"
        " whose classes are others: write `import lightning as L` (or `from lightning import pytorch as pl`) instead of"
        " `import pytorch_lightning as pl`, everywhere."
    )


if "pytorch_lightning" in sys.modules:
    for _name in ("chimera", "chimera_gpipe", "chimera_1f1b"):
        sys.modules["pytorch_lightning.strategies"].StrategyRegistry.register(
            _name, _refuse, description="For the Trainer of `lightning` alone", override=True
        )
