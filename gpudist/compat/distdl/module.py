"""Base class of DistDL's layers, for programs that derive their own from it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class Module(torch.nn.Module):
    """Module that is set up at its first call, and again when its input changes.

    Subclasses may override ``_distdl_module_setup``, ``_distdl_module_teardown`` and
    ``_distdl_input_changed``; each takes the tuple of inputs. A setup that need not be repeated
    sets ``_distdl_is_setup``.
    """

    _distdl_backend: ModuleType

    def __init__(self) -> None:
        super().__init__()
        self._distdl_is_setup = False
        self.register_forward_pre_hook(_set_up)

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None: ...

    def _distdl_module_teardown(self, input: tuple[Any, ...]) -> None: ...

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:
        return False


def _set_up(module: Any, input: tuple[Any, ...]) -> None:
    if module._distdl_is_setup and not module._distdl_input_changed(input):
        return
    if module._distdl_is_setup:
        module._distdl_module_teardown(input)
    module._distdl_module_setup(input)
