"""Networks of neuraloperator."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from neuralop.models import CODANO, FNO, SFNO, TFNO, UNO, UQNO

from tests.zoo.network import Network, image


def _uno(size: object) -> UNO:
    return UNO(
        2,
        1,
        8,
        uno_out_channels=[8, 12, 8],
        uno_n_modes=[[4, 4], [3, 3], [4, 4]],
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
        n_layers=3,
        channel_mlp_skip="linear",
    )


NETWORKS = [
    Network(
        "neuraloperator/fno_1d", lambda size: FNO((8,), 2, 1, 8, n_layers=2), (64,), (67,), image(2)
    ),
    Network(
        "neuraloperator/fno_3d",
        lambda size: FNO((4, 4, 4), 2, 1, 6, n_layers=2, norm="group_norm", domain_padding=0.2),
        (12, 12, 12),
        (13, 11, 9),
        image(2),
    ),
    Network(
        "neuraloperator/tfno",
        lambda size: TFNO((6, 6), 2, 1, 8, n_layers=2, factorization="tucker", rank=0.5),
        (24, 24),
        (25, 23),
        image(2),
    ),
    Network(
        "neuraloperator/sfno",
        lambda size: SFNO((6, 12), 2, 1, 8, n_layers=2),
        (24, 48),
        (25, 50),
        image(2),
    ),
    Network("neuraloperator/uno", _uno, (24, 24), (28, 20), image(2)),
    Network(
        "neuraloperator/uqno",
        lambda size: UQNO(FNO((4, 4), 2, 1, 6, n_layers=2)),
        (24, 24),
        (25, 23),
        image(2),
    ),
    Network(
        "neuraloperator/codano",
        lambda size: CODANO(
            n_layers=2,
            n_modes=[[4, 4]] * 2,
            per_layer_scaling_factors=[[1, 1]] * 2,
            n_heads=[2, 2],
            attention_scaling_factors=[1, 1],
            hidden_variable_codimension=4,
            lifting_channels=8,
            use_positional_encoding=False,
        ),
        (24, 24),
        (25, 23),
        image(2),
    ),
    Network(
        "neuraloperator/fno_2d",
        lambda size: FNO((8, 8), 2, 1, 8, n_layers=2),
        (24, 24),
        (25, 23),
        image(2),
    ),
]
