"""A mixture of experts in place of a block's MLP (docs/experts.md).

    E experts   k of them for each token   F = width of an expert   N tokens

A router, one matrix of (E, C), gives each token E logits. The k largest choose its experts, MLPs of F hidden
values, and a softmax of the logits weights their outputs (Shazeer et al. 2017). A step computes, and reads, k experts a
token instead of one MLP with as many parameters as all of them. A shared expert, if there is one, is added for each
token, in some models times a gate (DeepSeekMoE, Dai et al. 2024; Qwen2-MoE).

Whoever reads GPT-2 can leave this file out: transformer.py selects it by one line.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.config import Experts, LayerKind, ModelConfig
from nanoinfer.models.layers import ACTIVATIONS, GatedMLP, RMSNorm, gate, make_mlp

CHUNK = 64
"""Tokens for which all experts are computed at once: E * CHUNK * F hidden values are in memory."""


def route(logits: Tensor, experts: Experts, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts, (N, k) int64 in ascending order, and their weights, (N, k) float32.

    Of equal scores, that of the lower index is chosen. If a logit or a correction is not finite, the weights are
    NaN.

    Args:
        logits: of the router, (N, E).
        experts: the mixture.
        correction: (E), added to the scores where experts are chosen; None: there is none.
    """
    logits = logits.float()
    scores = logits.sigmoid() if experts.scoring == "sigmoid" else logits.softmax(-1)
    ranks = logits if experts.group_top == 1 else scores  # logits: rounding may make different scores equal
    if correction is not None:
        ranks = scores + correction
    if experts.groups > 1:
        ranks = _within_groups(ranks, experts)
    chosen = _first(ranks, experts.per_token).sort(dim=-1).values
    weights = scores.gather(-1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    checked = logits if correction is None else logits + correction
    return chosen, weights * experts.scale + (checked * 0.0).sum(-1, keepdim=True)


def _first(ranks: Tensor, count: int) -> Tensor:
    """Return the indices of the highest values, (N, count), highest first; topk may choose either of equal ones."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _within_groups(ranks: Tensor, experts: Experts) -> Tensor:
    """Return ranks, (N, E), of the experts of the groups with the highest scores, and -inf for all others."""
    groups = ranks.view(len(ranks), experts.groups, -1)  # (N, groups, experts of a group)
    best = groups.sort(dim=-1, descending=True).values[..., : experts.group_top].sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _first(best, experts.groups_per_token), True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


class Correction(nn.Module):
    """What is added to the score of each expert where experts are chosen (`Experts.correction`), in float32."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(count))


class Stack(nn.Module):
    """The matrices of one of the products of all experts, one below the other: E of (rows, columns)."""

    def __init__(self, count: int, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.empty(count * rows, columns))
        self.bias = nn.Parameter(torch.empty(count * rows)) if bias else None

    def one(self, expert: int, x: Tensor) -> Tensor:
        """Return the product of one expert, (N, rows), for x, (N, columns)."""
        bias = None if self.bias is None else self.bias.view(self.count, -1)[expert]
        return F.linear(x, self.weight.view(self.count, -1, x.shape[1])[expert], bias)

    def gathered(self, chosen: Tensor, x: Tensor) -> Tensor:
        """Return the products of the experts `chosen`, (N, k, rows, 1), for x, (N, k or 1, columns, 1)."""
        y = self.weight.view(self.count, -1, x.shape[-2])[chosen] @ x
        return y if self.bias is None else y + self.bias.view(self.count, -1, 1)[chosen]

    def all(self, x: Tensor) -> Tensor:
        """Return the products of all experts, (E, N, rows), for x, (N, columns) or (E, N, columns)."""
        y = x @ self.weight.view(self.count, -1, x.shape[-1]).mT
        return y if self.bias is None else y + self.bias.view(self.count, 1, -1)


class ExpertMLP(nn.Module):
    """A mixture of experts. It has three forms of one sum, which differ only in rounding.

    The engines of static shapes set `static_shapes`: no shape and no branch then depends on a value.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = experts = config.experts
        self.router = nn.Linear(config.n_embd, experts.count, bias=experts.bias)
        self.correction = Correction(experts.count) if experts.correction else None
        widths = dict.fromkeys(config.mlp_inputs, (experts.width, config.n_embd))
        widths["c_proj"] = (config.n_embd, experts.width)
        self.experts = nn.ModuleDict(
            {name: Stack(experts.count, *shape, experts.bias) for name, shape in widths.items()}
        )
        if experts.shared_width:
            self.shared = make_mlp(replace(config, n_inner=experts.shared_width, bias=False))
        if experts.shared_gate:
            self.shared_gate = nn.Linear(config.n_embd, 1, bias=False)
        self.activation = config.activation
        self.static_shapes = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of the chosen experts of x, (..., C), same shape."""
        y = self.mixture(x, self.router(x))
        if not self.config.shared_width:
            return y
        shared: Tensor = self.shared(x)
        return y + (shared * self.shared_gate(x).sigmoid() if self.config.shared_gate else shared)

    def mixture(self, x: Tensor, logits: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the sum, (..., C), for x, (..., C), and the router's logits, (..., E).

        scales, (E), are factors of the experts' outputs.
        """
        rows = x.reshape(-1, x.shape[-1])  # (N, C)
        correction = None if self.correction is None else self.correction.bias.float()
        chosen, weights = route(logits.reshape(-1, self.config.count), self.config, correction)
        if scales is not None:
            weights = weights * scales.float()[chosen]
        if not self.static_shapes:
            y = self._one_by_one(rows, chosen, weights)
        elif chosen.numel() <= self.config.count:
            y = self._gathered(rows, chosen, weights)
        else:
            chunks = (torch.split(t, CHUNK) for t in (rows, chosen, weights))
            y = torch.cat([self._all(*chunk) for chunk in zip(*chunks, strict=True)])
        return y.to(x.dtype).view(x.shape)

    def _stacks(self) -> list[Stack]:
        """Return c_gate, if the experts are gated, c_fc and c_proj."""
        return list(self.experts.values())  # type: ignore[arg-type]

    def _hidden(self, products: list[Tensor]) -> Tensor:
        """Return the hidden layer for the outputs of c_gate, if the experts are gated, and c_fc."""
        first, *rest = products
        return gate(self.activation, first, *rest) if rest else ACTIVATIONS[self.activation](first)

    def _one_by_one(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Each expert, in ascending order, for the tokens that chose it. x and y, (N, C); y is float32."""
        y = torch.zeros_like(x, dtype=torch.float32)
        *first, c_proj = self._stacks()
        for expert in torch.unique(chosen).tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            part = x[rows]
            hidden = self._hidden([stack.one(expert, part) for stack in first])
            y.index_add_(0, rows, c_proj.one(expert, hidden) * weights[rows, place, None])
        return y

    def _gathered(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The matrices of each token's experts, copied: for few tokens, the fewest bytes."""
        *first, c_proj = self._stacks()
        column = x[:, None, :, None]
        hidden = self._hidden([stack.gathered(chosen, column) for stack in first])  # (N, k, F, 1)
        return (c_proj.gathered(chosen, hidden).squeeze(-1) * weights[..., None]).sum(1)

    def _all(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """All experts for all tokens; what was not chosen is dropped, even if it is not finite."""
        *first, c_proj = self._stacks()
        hidden = self._hidden([stack.all(x) for stack in first])  # (E, N, F)
        used = torch.zeros(x.shape[0], self.config.count, dtype=torch.bool, device=x.device).scatter(1, chosen, True)
        weight = torch.zeros_like(used, dtype=torch.float32).scatter(1, chosen, weights)
        y = c_proj.all(hidden) * weight.t()[..., None]
        return y.masked_fill(~used.t()[..., None], 0.0).sum(0)


class ExpertsBesideMLP(ExpertMLP):
    """An MLP and a mixture of experts (Gemma 4 26B-A4B). The parameters of the MLP have the names of a shared expert's.

    Both read the residual stream x after attention, each through a norm of its own, and their outputs have norms of
    their own, so that neither drowns the other. The block's last norm is that of the sum:

        a = post_1(mlp(ln_1(x)))
        b = post_2(experts(ln_2(x)))        logits of the router = W (rms(x) * router_scale) / sqrt(C)
        y = a + b                           weights of the chosen experts: their softmax, times expert_scale of each
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.router_scale = nn.Parameter(torch.ones(config.n_embd))
        self.expert_scale = nn.Parameter(torch.ones(self.config.count))
        self.shared = GatedMLP(replace(config, bias=False))
        self.ln_1, self.post_1, self.ln_2, self.post_2 = (RMSNorm(config, config.n_embd) for _ in range(4))
        self.eps = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both for the residual stream x, (..., C), same shape."""
        routed = F.rms_norm(x, x.shape[-1:], self.router_scale, self.eps) * x.shape[-1] ** -0.5
        mixed = self.mixture(self.ln_2(x), self.router(routed), self.expert_scale)
        total: Tensor = self.post_1(self.shared(self.ln_1(x))) + self.post_2(mixed)
        return total


def other_mlp(config: ModelConfig, kind: LayerKind) -> ExpertMLP | None:
    """Return the MLP of a layer with experts, or None if it has none."""
    if not kind.experts or config.experts is None:
        return None
    return ExpertsBesideMLP(config) if config.experts.beside else ExpertMLP(config)
