"""The vocabulary of random programs: each function draws one operation in one of its spellings.

A function gets the drawing, a variable and its shape, and returns an expression, or lines that set
``OUT``, or ``None`` if it does not fit. What torch refuses is drawn again, so functions may be
bold.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tests.hazards.programs import Drawing

Shape = tuple[int, ...]
Operation = Callable[[Drawing, str, Shape], "str | list[str] | None"]
WORDS: list[tuple[Operation, int]] = []


def word(weight: int = 1) -> Callable[[Operation], Operation]:
    def enter(operation: Operation) -> Operation:
        WORDS.append((operation, weight))
        return operation

    return enter


def spatial(s: Shape) -> int:
    """Number of spatial dims of ``[B, C, *spatial]``; 0 for other shapes."""
    return len(s) - 2 if 3 <= len(s) <= 5 else 0


def tup(values: object) -> str:
    return repr(tuple(values))  # pyright: ignore[reportArgumentType]


@word(3)
def activation(d: Drawing, x: str, s: Shape) -> str:
    return d.pick(
        f"torch.relu({x})", f"{x}.relu()", f"F.relu({x})", f"nn.ReLU()({x})", f"F.gelu({x})",
        f"F.silu({x})", f"{x}.tanh()", f"torch.sigmoid({x})", f"F.softplus({x})",
        f"F.elu({x}, 0.7)", f"F.leaky_relu({x}, negative_slope=0.1)", f"{x}.sin()",
        f"torch.cos({x})", f"{x} * 0.5", f"1 - {x}", f"-{x}", f"{x} / 2 + 1",
        f"torch.exp(-{x}.square())", f"{x}.clamp(-1, 1)", f"torch.clip({x}, min=-0.5)",
        f"F.hardtanh({x})", f"({x}.abs() + 0.1).sqrt()", f"torch.where({x} > 0, {x}, {x} * 0.1)",
        f"{x}.masked_fill({x} < 0, 0.0)", f"F.relu({x} + 0.1, inplace=True)",
        f"F.logsigmoid({x})", f"{d.attribute('nn.PReLU()')}({x})", f"{x}.pow(2)", f"{x} ** 2 - {x}",
        f"torch.addcmul({x}, {x}, {x}, value=0.1)", f"F.mish({x})", f"{x}.type_as({x}).sub(0.5)",
    )  # fmt: skip


@word(3)
def convolution(d: Drawing, x: str, s: Shape) -> str | None:
    n = spatial(s)
    if not n:
        return None
    groups = d.pick(1, 1, 2, s[1])
    out = d.between(1, 3) * groups
    k, stride, dilation = ([d.between(1, top) for _ in range(n)] for top in (4, 2, 2))
    padding = [d.between(0, 2) for _ in range(n)]
    kind = d.pick("layer", "same", "function", "torch", "transposed", "mode")
    numbers = f"stride={tup(stride)}, padding={tup(padding)}, dilation={tup(dilation)}"
    if kind == "layer":
        numbers += f", groups={groups}, bias={d.pick(True, False)}"
        layer = f"nn.Conv{n}d({s[1]}, {out}, {tup(k)}, {numbers})"
    elif kind == "same":
        layer = f"nn.Conv{n}d({s[1]}, {out}, {tup(k)}, groups={groups}, padding='same')"
    elif kind == "mode":
        mode = d.pick("reflect", "replicate", "circular")
        layer = f"nn.Conv{n}d({s[1]}, {out}, 3, padding=1, padding_mode={mode!r}, groups={groups})"
    elif kind == "transposed":
        layer = f"nn.ConvTranspose{n}d({s[1]}, {out}, {tup(k)}, {numbers}, groups={groups})"
    else:
        w = d.parameter(out, s[1] // groups, *k)
        where = "F" if kind == "function" else "torch"
        numbers = f"{tup(stride)}, {tup(padding)}, {tup(dilation)}, {groups}"
        return f"{where}.conv{n}d({x}, {w}, None, {numbers})"
    return f"{d.attribute(layer)}({x})"


@word(2)
def pool(d: Drawing, x: str, s: Shape) -> str | None:
    n = spatial(s)
    if not n:
        return None
    k, stride = d.between(2, 3), d.between(1, 3)
    ramp = f"({x} + torch.linspace(0, 1, {prod(s)}).view({tup(s)}))"
    small = tup(d.between(1, 4) for _ in range(n))
    return d.pick(
        f"F.avg_pool{n}d({x}, {k}, {stride}, {k // 2})",
        f"nn.AvgPool{n}d({k}, ceil_mode=True)({x})",
        f"F.max_pool{n}d({ramp}, {k}, {stride}, padding={k // 2})", f"nn.MaxPool{n}d({k})({ramp})",
        f"F.adaptive_avg_pool{n}d({x}, {small})", f"F.adaptive_max_pool{n}d({ramp}, {small})",
        f"F.avg_pool{n}d({x}, {k}, count_include_pad=False, padding=1)",
    )  # fmt: skip


@word(3)
def norm(d: Drawing, x: str, s: Shape) -> str:
    n, dims, last = spatial(s), d.dims(s), s[-1]
    options = [
        f"F.layer_norm({x}, ({last},))", f"{d.attribute(f'nn.LayerNorm({last})')}({x})",
        f"F.normalize({x} + 0.5, dim={d.dim(s)})", f"F.layer_norm({x}, {tup(s[1:])})",
        f"({x} - {x}.mean({dims}, keepdim=True)) / ({x}.var({dims}, keepdim=True) + 1).sqrt()",
        f"{x} * torch.rsqrt({x}.pow(2).mean({dims[0]}, keepdim=True) + 0.1)",
        f"F.rms_norm({x}, ({last},), eps=0.1)",
    ]  # fmt: skip
    if n:
        c = s[1]
        options += [
            f"{d.attribute(f'nn.BatchNorm{n}d({c}, eps=0.1)')}({x})",
            f"{d.attribute(f'nn.InstanceNorm{n}d({c}, affine=True, eps=0.1)')}({x})",
            f"{d.attribute(f'nn.GroupNorm({d.pick(1, c)}, {c}, eps=0.1)')}({x})",
            f"F.instance_norm({x}, eps=0.1)", f"F.group_norm({x}, {d.pick(1, 2)}, eps=0.1)",
            f"F.batch_norm({x}, None, None, training=True, eps=0.1)",
        ]  # fmt: skip
    return d.pick(*options)


@word(2)
def pad(d: Drawing, x: str, s: Shape) -> str | None:
    n = d.between(1, min(3, len(s)))
    low = d.pick(0, 0, -1)
    given = [d.between(low, 2) for _ in range(2 * n)]
    mode = d.pick("constant", "constant", "reflect", "replicate", "circular")
    if mode == "circular":
        # Torch, which cuts first, then wraps cells that it has not written yet: its own gradient is
        # not that of its forward.
        given = [max(0, one) for one in given]
    amounts = tup(given)
    if mode == "constant":
        return d.pick(f"F.pad({x}, {amounts})", f"F.pad({x}, {amounts}, value=0.3)")
    return f"F.pad({x}, {amounts}, mode={mode!r})"


@word(2)
def resampled(d: Drawing, x: str, s: Shape) -> str | None:
    n = spatial(s)
    if not n:
        return None
    smooth = {1: "linear", 2: "bilinear", 3: "trilinear"}[n]
    size = tup(d.between(2, 9) for _ in range(n))
    factor = d.pick(0.5, 1.5, 2, 2.0, 0.7)
    options = [
        f"F.interpolate({x}, size={size}, mode={smooth!r}, align_corners={d.pick(True, False)})",
        f"F.interpolate({x}, scale_factor={factor}, mode={smooth!r})",
        f"F.interpolate({x}, {size})", f"F.interpolate({x}, scale_factor={factor})",
        f"nn.Upsample(scale_factor=2, mode='nearest')({x})",
        f"F.interpolate({x}, {size}, mode='area')",
        f"F.interpolate({x}, {size}, mode='nearest-exact')",
    ]  # fmt: skip
    if n == 2:
        options += [
            f"F.interpolate({x}, {size}, mode='bicubic', align_corners={d.pick(True, False)})",
            f"F.pixel_shuffle({x}, 2)", f"F.pixel_unshuffle({x}, 2)",
            f"F.unfold({x}, 3, padding=1, stride={d.between(1, 2)})",
            f"F.fold(F.unfold({x}, 2, stride=1), {s[2:]}, 2)",
        ]  # fmt: skip
    return d.pick(*options)


@word(3)
def reshaped(d: Drawing, x: str, s: Shape) -> str | None:
    i = d.dim(s)
    order = d.rng.sample(range(len(s)), len(s))
    options = [
        f"{x}.permute({', '.join(map(str, order))})", f"torch.permute({x}, {tup(order)})",
        f"{x}.transpose({i}, -1)", f"torch.movedim({x}, {i}, 0)", f"{x}.unsqueeze({i})",
        f"{x}.squeeze()", f"{x}[None]", f"{x}.swapaxes(0, {i})", f"{x}.flatten({i})",
        f"{x}.reshape(-1, {s[-1]})", f"{x}.mT", f"torch.squeeze({x}, {i})",
        f"{x}.contiguous().view(-1)",
        f"{x}.reshape({s[0]}, -1)", f"{x}[..., None]",
    ]  # fmt: skip
    if i + 1 < len(s):
        merged = (*s[:i], s[i] * s[i + 1], *s[i + 2 :])
        options += [
            f"{x}.flatten({i}, {i + 1})", f"{x}.reshape({tup(merged)})",
            f"{x}.contiguous().view({tup(merged)})",
        ]  # fmt: skip
    factors = [k for k in range(2, s[i]) if s[i] % k == 0]
    if factors:
        k = d.rng.choice(factors)
        parted = (*s[:i], k, s[i] // k, *s[i + 1 :])
        options += [
            f"{x}.unflatten({i}, ({k}, -1))", f"{x}.reshape({tup(parted)})",
            f"{x}.contiguous().view({tup(parted)}).transpose({i}, {i + 1})",
        ]  # fmt: skip
    return d.pick(*options)


@word(2)
def windows(d: Drawing, x: str, s: Shape) -> str | None:
    if len(s) != 4 or s[2] % 2 or s[3] % 2:
        return None
    b, c, h, w = s
    parts = f"{x}.reshape({b}, {c}, {h // 2}, 2, {w // 2}, 2)"
    return d.pick(
        f"{parts}.permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, {c})",
        f"{parts}.permute(0, 3, 5, 1, 2, 4).reshape({b}, {4 * c}, {h // 2}, {w // 2})",
        f"torch.roll({parts}, (-1, 1), (2, 3)).amax((3, 5))",
        f"torch.cat([{x}[:, :, ::2, ::2], {x}[:, :, 1::2, 1::2]], 1)",
    )


@word(3)
def sliced(d: Drawing, x: str, s: Shape) -> str | None:
    i = d.dim(s)
    if s[i] < 2:
        return None
    start = d.between(0, s[i] - 1)
    stop = d.between(start + 1, s[i])
    before = ":, " * i
    return d.pick(
        f"{x}[{before}{start}:{stop}]", f"{x}[{before}::{d.between(2, 3)}]",
        f"{x}[{before}{start}]",
        f"{x}.narrow({i}, {start}, {stop - start})", f"{x}.select({i}, {start})", f"{x}[..., 1:]",
        f"{x}[{before}-{d.between(1, s[i])}:]", f"torch.narrow({x}, {i}, {start}, 1)",
        f"{x}[{before}{start}:{stop}:2]", f"{x}[{before}1:] - {x}[{before}:-1]",
        f"torch.diff({x}, dim={i})", f"{x}.unfold({i}, 2, {d.between(1, 2)})",
        f"torch.tensor_split({x}, 2, {i})[1]", f"{x}.chunk(2, {i})[0]",
        f"torch.split({x}, 2, {i})[-1]",
        f"{x}.unbind({i})[{start}]", f"torch.cat({x}.chunk(3, dim={i})[::-1], {i})",
        f"torch.cat(torch.split({x}, [{start}, {s[i] - start}], {i})[::-1], dim={i})",
    )  # fmt: skip


@word(2)
def moved(d: Drawing, x: str, s: Shape) -> str | None:
    i, by = d.dim(s), d.between(-4, 4)
    one = tup(1 if k == i else n for k, n in enumerate(s))
    dims = d.dims(s, 2)
    return d.pick(
        f"torch.roll({x}, {by}, {i})", f"{x}.roll({tup([by] * len(dims))}, {dims})",
        f"{x}.flip({i})",
        f"torch.flip({x}, {dims})", f"torch.rot90({x}, 1, (0, -1))", f"{x}.roll({by})",
        f"{x}.index_select({i}, torch.arange({s[i]}).flip(0))",
        f"{x}[{':, ' * i}[{d.between(0, s[i] - 1)}, 0, -1]]",
        f"torch.take_along_dim({x}, {d.buffer(f'torch.arange({s[i]}).flip(0)')}.view("
        f"{tup([s[i] if k == i else 1 for k in range(len(s))])}), {i})",
        f"{x}.gather({i}, torch.zeros({one}, dtype=torch.long))",
    )  # fmt: skip


@word(2)
def joined(d: Drawing, x: str, s: Shape) -> str | None:
    y, i = d.other(s), d.dim(s)
    return d.pick(
        f"torch.cat([{x}, {y}], {i})", f"torch.stack([{x}, {y}], dim={i})",
        f"torch.concat(({y}, {x} * 2), dim={i - len(s)})", f"torch.stack(({x}, {y})).mean(0)",
        f"torch.cat([{x}, torch.zeros_like({y})], dim={i})", f"torch.hstack([{x}, {y}])",
    )  # fmt: skip


@word(3)
def combined(d: Drawing, x: str, s: Shape) -> str | None:
    y = d.other(s, broadcast=True)
    return d.pick(
        f"{x} + {y}", f"{x} * {y}", f"torch.sub({x}, {y}, alpha=0.5)", f"{x} - {y}.sin()",
        f"torch.lerp({x}, {y}, 0.3)" if y is not None else None, f"{x} / (1 + {y}.abs())",
        f"torch.mul({y}, {x})", f"torch.where({y} > -9, {x}, {y})", f"torch.hypot({x}, {y} + 3)",
        f"{x}.add({y}).mul(0.5)", f"{x} * torch.sigmoid({y})",
    )  # fmt: skip


@word(3)
def with_parameter(d: Drawing, x: str, s: Shape) -> str:
    kept = d.dims(s, len(s))
    shape = [n if i in kept else 1 for i, n in enumerate(s)][d.pick(0, kept[0]) :]
    p, b, i = d.parameter(*shape), d.buffer(f"torch.linspace(-1, 1, {s[-1]})"), d.dim(s)
    ones = tup(s[i] if k == i else 1 for k in range(len(s)))
    table = d.attribute(f"nn.Embedding({s[i]}, 1)")
    return d.pick(
        f"{x} + {p}", f"{x} * {p}", f"{p} - {x}", f"{x} * {b}",
        f"{x} + torch.arange({s[i]}).view({ones}) / 9",
        f"{x} + {table}(torch.arange({s[i]})).view({ones})", f"{x} * torch.softmax({p}, -1)",
        f"{x} * ({p} / {p}.norm())", f"{x}.masked_fill(torch.arange({s[-1]}) % 2 == 0, 0.5)",
        f"torch.where({b} > 0, {x}, {p})", f"torch.add({x}, {p}, alpha=2)",
        f"{x}.masked_fill({b} < 0, -1.0)",
    )  # fmt: skip


@word(2)
def reduced(d: Drawing, x: str, s: Shape) -> str:
    dims, keep, i = d.dims(s), d.pick(True, False), d.dim(s)
    ramp = f"({x} + torch.linspace(0, 1, {prod(s)}).view({tup(s)}))"
    return d.pick(
        f"{x}.mean({dims}, keepdim={keep})", f"torch.sum({x}, dim={dims}, keepdim={keep}) / 4",
        f"{ramp}.amax({dims}, keepdim={keep})", f"{ramp}.max({i}, keepdim={keep}).values",
        f"{ramp}.min({i})[0]", f"({x} + {ramp}).var({dims}, keepdim={keep}, unbiased=False)",
        f"{x}.logsumexp({dims}, {keep})", f"torch.linalg.vector_norm({x} + 0.1, dim={dims})",
        f"{x} - {x}.mean()", f"{x} - {x}.mean({dims}, True)", f"{ramp}.std({i}, unbiased=False)",
        f"{ramp}.sort({i}).values", f"{ramp}.topk(1, dim={i}).values",
        f"{x} * {x}.sum() / {prod(s)}",
        f"torch.var_mean({ramp}, {dims}, unbiased=False)[0]", f"{x}[:1].prod({i})",
        f"{ramp}.norm(dim={i}, keepdim={keep})", f"{ramp}.median({i}).values",
    )  # fmt: skip


@word(2)
def along(d: Drawing, x: str, s: Shape) -> str:
    i = d.dim(s)
    return d.pick(
        f"{x}.softmax({i})", f"torch.log_softmax({x}, dim={i})", f"F.softmax({x}, {i})",
        f"{x}.cumsum({i}) / {s[i]}", f"torch.cumsum({x}.flip({i}), {i}) / {s[i]}",
        f"torch.logcumsumexp({x}, {i})", f"F.glu({x}, dim={i})", f"F.softmin({x}, {i})",
        f"torch.cumprod(1 + {x} / 9, {i})",
    )  # fmt: skip


@word(3)
def product(d: Drawing, x: str, s: Shape) -> str | None:
    n, i, k = s[-1], d.dim(s), d.between(1, 4)
    names = "abcdefg"[: len(s)]
    out = names.replace(names[i], "z")
    options = [
        f"{d.attribute(f'nn.Linear({n}, {k})')}({x})", f"F.linear({x}, {d.parameter(k, n)})",
        f"{x} @ {d.parameter(n, k)}", f"torch.einsum('...i,ij->...j', {x}, {d.parameter(n, k)})",
        f"torch.einsum('{names},{names[i]}z->{out}', {x}, {d.parameter(s[i], k)})",
        f"torch.tensordot({x}, {d.parameter(s[i], k)}, dims=([{i}], [0]))",
    ]  # fmt: skip
    if len(s) > 1:
        options += [
            f"torch.matmul({d.parameter(k, s[-2])}, {x})", f"{x} @ {x}.transpose(-1, -2) / {n}",
            f"torch.einsum('...ij,...kj->...ik', {x}, {x}.sin()) / {n}",
            f"torch.softmax({x} @ {x}.mT, dim=-1) @ {x}",
        ]  # fmt: skip
    if len(s) == 3:
        options += [f"torch.bmm({x}, {x}.transpose(1, 2)) / {n}"]
    if len(s) in (3, 4):
        causal = d.pick(True, False)
        options += [f"F.scaled_dot_product_attention({x}, {x}, {x}.sin(), is_causal={causal})"]
    return d.pick(*options)


@word(2)
def repeated(d: Drawing, x: str, s: Shape) -> str:
    i, times = d.dim(s), [d.pick(1, 1, 2) for _ in s]
    return d.pick(
        f"{x}.repeat{tup(times)}", f"torch.tile({x}, {tup(times)})",
        f"{x}.repeat_interleave(2, dim={i})",
        f"{x}.unsqueeze({i}).expand({', '.join(['-1'] * i + ['2'] + ['-1'] * (len(s) - i))})",
        f"{x}.mean({i}, keepdim=True).expand_as({x})", f"torch.broadcast_to({x}[:1], {tup(s)})",
        f"{x}[None].expand(2, *{tup(s)}).sum(0)",
    )  # fmt: skip


@word(3)
def in_place(d: Drawing, x: str, s: Shape) -> list[str]:
    i = d.dim(s)
    before, half = ":, " * i, max(1, s[i] // 2)
    view = d.pick(
        f"OUT[{before}:{half}]", f"OUT.transpose(0, {i})", "OUT.view(-1)", f"OUT.narrow({i}, 0, 1)",
        f"OUT.flatten({i})", f"OUT.unsqueeze({i})", f"OUT[{before}::2]", "OUT", "OUT[..., 0]",
    )  # fmt: skip
    change = d.pick(
        f"{view}.mul_(0.5)", f"{view}.add_(1.0)", f"F.relu_({view})", f"{view}.zero_()",
        f"{view}.clamp_(-1, 1)", f"F.leaky_relu({view}, 0.2, inplace=True)",
        f"{view}.sub_(OUT.mean())",
        f"OUT[{before}:{half}] = 0.5", f"OUT[{before}{s[i] - half}:] = {x}[{before}:{half}]",
        f"OUT[{before}0] += 1", "OUT.masked_fill_(OUT < 0, 0.0)", f"OUT.copy_({x}.flip({i}))",
        f"OUT.index_fill_({i}, torch.tensor([0]), 0.25)",
    )  # fmt: skip
    first = d.pick(
        f"OUT = {x}.clone(memory_format=torch.contiguous_format)", f"OUT = {x} * 1.5",
        f"OUT = torch.zeros({tup(s)}) + {x}",
    )  # fmt: skip
    return [first, change]


@word(1)
def written(d: Drawing, x: str, s: Shape) -> list[str]:
    i = d.dim(s)
    before, half = ":, " * i, max(1, s[i] // 2)
    made = d.pick(
        f"torch.zeros({tup(s)}, dtype={x}.dtype)", f"torch.zeros_like({x})",
        f"{x}.new_ones({tup(s)})",
        f"torch.full({tup(s)}, 0.5, device={x}.device)", f"torch.empty_like({x}).fill_(1.0)",
    )  # fmt: skip
    return [
        f"OUT = {made}",
        d.pick(
            f"OUT[{before}:{half}] = {x}[{before}{s[i] - half}:]",
            f"OUT[{before}::2] = {x}[{before}::2].sin()",
            f"OUT[{before}{s[i] - 1}] = {x}[{before}0]",
            f"OUT[...] = {x}.flip({i})",
        ),
    ]
