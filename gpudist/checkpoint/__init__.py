"""State dicts of the sequential model, and checkpoints that any layout can load."""

from gpudist.checkpoint.sequential import full_state_dict, load_full_state_dict

__all__ = ["full_state_dict", "load_full_state_dict"]
