"""State dicts of the sequential model, and checkpoints that any layout can load."""

from gpudist.checkpoint.dcp import exists, load, save
from gpudist.checkpoint.optimizer import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
)
from gpudist.checkpoint.sequential import full_state_dict, load_full_state_dict

__all__ = [
    "exists",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "save",
]
