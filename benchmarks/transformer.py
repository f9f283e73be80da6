"""Training steps of a GPT split over workers, compared with DTensor and the sequential one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.case import Case, Side
from benchmarks.peers import dtensor as dtensor_peer
from benchmarks.training import Step, Training, is_right
from examples.gpt import GPT, Cut, ParallelGPT, Sizes
from gpudist.nn import VocabParallelCrossEntropyLoss
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import Partition

SIZES = {"GPT": Sizes(4096, 256, 256, 8, 2)}
SAMPLES = 4


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are a layer's output, which is whole on every worker."""
    found: list[Case] = []
    for name, sizes in SIZES.items():
        words = f"{sizes.layers} layers, {sizes.width} features, {SAMPLES} x {sizes.longest} tokens"
        nbytes = SAMPLES * sizes.longest * sizes.width * 4
        case = Case("tensor_parallel", f"{name}, {words}", ranks, nbytes, {"network": name})
        found.append(case)
    return found


def tokens_of(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch and its targets."""
    generator = torch.Generator().manual_seed(1)
    shape = SAMPLES, sizes.longest + 1
    tokens = torch.randint(sizes.vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class CrossEntropy(torch.nn.Module):
    """Cross-entropy of logits ``[B, L, vocabulary]``."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sequential(sizes: Sizes) -> Training:
    torch.manual_seed(0)
    return Training(GPT(sizes), CrossEntropy(), *tokens_of(sizes))


def parallel(sizes: Sizes, P_world: Partition) -> tuple[ParallelGPT, Training]:
    P = P_world.create_cartesian_topology_partition([1, P_world.size])
    torch.manual_seed(0)
    network = ParallelGPT(sizes, Cut(P, split_sequence=False, attention="heads"))
    return network, Training(network, VocabParallelCrossEntropyLoss(P), *tokens_of(sizes))


class DTensorTraining(Training):
    """Training by DTensor; logits stay split along the vocabulary."""

    def step(self) -> Step:
        with loss_parallel():
            return super().step()


def dtensor(sizes: Sizes, mesh: DeviceMesh) -> DTensorTraining:
    """Build the DTensor network, split like ours along heads, inner features and vocabulary."""
    torch.manual_seed(0)
    network = GPT(sizes)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.qkv.*": ColwiseParallel(),
        "blocks.*.attention.out_proj": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    network = parallelize_module(network, mesh, plan)
    return DTensorTraining(network, CrossEntropy(), *tokens_of(sizes))


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the loss and the gradients.

    Only rank 0 runs the sequential one.
    """
    sizes = SIZES[case.parameters["network"]]
    expected = sequential(sizes).step()
    network, ours = parallel(sizes, P_world)
    own = own_step(network, expected)
    peer = dtensor(sizes, dtensor_peer.mesh(P_world))
    found = {
        "gpudist": Side(ours.step, lambda r: is_right_apart(r, own), ours.start_again),
        "dtensor": Side(peer.step, lambda r: is_right_apart(r, expected), peer.start_again),
    }
    if P_world.rank == 0:
        alone = sequential(sizes)
        side = Side(alone.step, lambda r: is_right_apart(r, expected), alone.start_again)
    else:
        side = Side(lambda: None, lambda nothing: nothing is None)
    return found | {"sequential": side}


def own_step(network: torch.nn.Module, expected: Step) -> Step:
    """Return the step with the blocks of gradients that a rank of a split network has."""
    placed = placements(network)
    boxes = {name: placed[name].own_box for name in placed}
    blocks = {
        name: gradient[box.slices] if (box := boxes.get(name)) is not None else gradient
        for name, gradient in expected.gradients.items()
    }
    return Step(expected.loss, blocks)


def is_right_apart(result: Step, expected: Step) -> bool:
    """Whether every gradient, but the bias of keys, is there and agrees."""
    # The bias of keys shifts all scores of a query equally, so its gradient is only rounding error.
    names = [name for name in expected.gradients if not name.endswith("k_proj.bias")]
    gradients = {name: _whole(result.gradients[name]) for name in names}
    return is_right(Step(result.loss, gradients), expected)


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
