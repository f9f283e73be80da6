"""The libraries, their virtual environments, and those that cannot be run here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import ROOT

FOLDER = ROOT / "build" / "correctness"
ADAPTERS = "benchmarks.correctness.adapters"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """A library that runs the cases.

    Attributes:
        name: name in the tables.
        adapter: module that runs a case by the library.
        environment: folder of its virtual environment in ``FOLDER``; empty for this Python.
        packages: packages that do not depend on torch.
        without_dependencies: packages installed alone, because they would replace torch.
    """

    name: str
    adapter: str
    environment: str = ""
    packages: tuple[str, ...] = ()
    without_dependencies: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Name of the file of its results."""
        return self.adapter.rpartition(".")[2]

    @property
    def python(self) -> Path:
        if not self.environment:
            return Path(sys.executable)
        return FOLDER / self.environment / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        return not self.environment or self._done.exists()

    @property
    def _done(self) -> Path:
        return FOLDER / self.environment / ".installed"

    def install(self) -> None:
        """Make the virtual environment; torch comes first, so that nothing else chooses it."""
        if self.is_installed:
            return
        folder = FOLDER / self.environment
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, "numpy", *self.packages], check=True)
        if self.without_dependencies:
            subprocess.run([*pip, "--no-deps", *self.without_dependencies], check=True)
        self._done.touch()


_SHARD_TENSOR_NEEDS = (
    "cftime", "cloudpickle", "einops", "fsspec", "gitpython", "h5py", "huggingface_hub",
    "hydra-core", "importlib-metadata", "jaxtyping", "nvtx", "omegaconf", "onnx", "orjson",
    "packaging", "pandas", "pillow", "psutil", "pyvers", "pyyaml", "requests", "s3fs",
    "safetensors", "termcolor", "tqdm", "treelib",
)  # fmt: skip

LIBRARIES = (
    Peer("gpudist.distribute", f"{ADAPTERS}.gpudist_distribute"),
    Peer("gpudist.nn", f"{ADAPTERS}.gpudist_layers"),
    Peer("DTensor", f"{ADAPTERS}.dtensor", "torch"),
    Peer(
        "ShardTensor", f"{ADAPTERS}.shard_tensor", "shard_tensor", _SHARD_TENSOR_NEEDS,
        ("nvidia-physicsnemo==2.2.2", "warp-lang", "tensordict", "timm", "torchvision==0.28.0"),
    ),
    Peer("SyncBatchNorm, FSDP2", f"{ADAPTERS}.sync_batch_norm", "torch"),
)  # fmt: skip

ABSENT = {
    "DTensor of torch 2.15.0": "the newest wheel on PyPI for x86-64 needs gigabytes of CUDA "
    "libraries, and PyPI has no wheel for the CPU",
    "DistConv (LBANN)": "PyPI has no package `distconv`",
    "DistDL and its fork": "PyPI has no package `distdl`",
    "mpi4torch 0.1.3": "does not compile with torch 2.13.0: `torch::autograd::deleteNode` and the "
    "`set_history` that it calls are gone. It has collectives, and no layer of any case",
}
