"""Pipeline parallelism for unchanged LightningModules.

Importing the package registers the strategies ``chimera``, ``chimera_gpipe`` and ``chimera_1f1b``::

    import lightning as L
    import lightning_chimera

    L.Trainer(strategy="chimera", devices=4).fit(module, datamodule)
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning_chimera.partition.anatomy import Family, register_family
    from lightning_chimera.strategy import ChimeraStrategy

__all__ = ["ChimeraStrategy", "Family", "register_family"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads the public names, and with them transformers, only when they are used."""
    if name == "ChimeraStrategy":
        from lightning_chimera.strategy import ChimeraStrategy

        return ChimeraStrategy
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
