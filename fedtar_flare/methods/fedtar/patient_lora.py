"""Patient-adaptive LoRA: every sample of a batch has low-rank factors of its own (paper, Eq. 4).

A layer that PEFT adapts, with frozen weight ``W`` and shared factors ``A``, ``B``, becomes for sample ``p`` ::

    W + s A B^T + s_p A_p B_p^T,   [A_p, B_p] = h_l(phi_p),   phi_p = W_proj q_p + b_proj (+ e_t)

with ``q_p`` the soft assignment of the patient to the site's clusters, ``h_l`` one linear hypernetwork per layer and
``e_t`` a learned embedding of the time step (the paper's form is ``time_conditioned=False``). The shared factors
travel; everything that :class:`PatientLoRA` owns is the site's own state and stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.methods.fedtar.config import EMBEDDING_DIM, PatientConfig
from fedtar_flare.models.adapters.lora import lora_layers

if TYPE_CHECKING:
    from peft import PeftModel

BIAS_NORM, WEIGHT_SCALE = 1.0, 0.1
"""Length of b_proj, a random vector, and of W_proj's columns at a common start; the paper's are 0 and 1."""
# The patient's A starts near one common random A: this is the size of its patient-dependent share.
_PATIENT_SHARE_OF_A = 0.1


class LayerHypernetwork(nn.Module):
    """h_l: the linear map from ``phi`` (B, d) to the factors of one layer.

    The B half is zero at the start, so that an untrained patient part changes nothing. The A half starts like LoRA's
    own A (Kaiming uniform) in its bias, with a small patient-dependent share.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, embedding_dim: int, generator: torch.Generator):
        super().__init__()
        self.rank = rank
        bound = 1 / math.sqrt(in_features)
        share = _PATIENT_SHARE_OF_A * bound
        self.a_weight = nn.Parameter(_uniform((rank * in_features, embedding_dim), share, generator))
        self.a_bias = nn.Parameter(_uniform((rank * in_features,), bound, generator))
        self.b_weight = nn.Parameter(torch.zeros(rank * out_features, embedding_dim))
        self.b_bias = nn.Parameter(torch.zeros(rank * out_features))

    def forward(self, phi: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """``A_p^T`` (B, r, in) and ``scale * B_p^T`` (B, r, out) of every sample."""
        a = nn.functional.linear(phi, self.a_weight, self.a_bias)
        b = scale * nn.functional.linear(phi, self.b_weight, self.b_bias)
        return a.view(len(phi), self.rank, -1), b.view(len(phi), self.rank, -1)


class _AdaptedLayer(NamedTuple):
    name: str
    layer: Any  # peft.tuners.lora.Linear over nn.Linear or Conv1D
    hypernetwork: LayerHypernetwork


@dataclass
class _Batch:
    """What one ``adapt`` context holds; factors are kept only while gradients are off."""

    q: Tensor
    time_step: Tensor
    phi: Tensor | None = None
    factors: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)


class PatientLoRA(nn.Module):
    """The patient part of every LoRA layer of a PEFT model.

    It is not a submodule of the PEFT model: its ``state_dict()`` is exactly the site's private state, with names
    ``projection.*``, ``time_embedding`` and ``hypernetworks.<layer path with / for .>.{a,b}_{weight,bias}``. It takes
    the device and precision of the LoRA factors; whoever moves the PEFT model moves this module likewise.

    Inside :meth:`adapt` each PEFT LoRA layer runs one fused pass for the shared and the patient part; outside of it the
    layers run PEFT's own forward, the shared part alone.

    ``config.scale`` is s_p of Eq. 4, ``config.components`` the length of q, ``rank`` r of A_p and B_p,
    ``embedding_dim`` d, the length of phi; the global random state is neither read nor changed. Raises ConfigError,
    which names the layer, where the model has no LoRA layer or one that is not plain LoRA (dropout, a variant such as
    DoRA) on ``nn.Linear`` or transformers' ``Conv1D``.
    """

    def __init__(
        self,
        peft_model: PeftModel,
        config: PatientConfig,
        *,
        rank: int = 4,
        time_steps: int,
        seed: int,
        embedding_dim: int = EMBEDDING_DIM,
    ):
        super().__init__()
        self.config, self.rank, self.time_steps = config, rank, time_steps
        layers = lora_layers(peft_model)
        generator = torch.Generator().manual_seed(seed)

        self.projection = nn.utils.skip_init(nn.Linear, config.components, embedding_dim)
        with torch.no_grad():
            # phi starts near one vector that all patients share. Far apart, each cluster gets an adapter of its own and
            # remembers the findings of its few patients.
            columns = torch.randn(self.projection.weight.shape, generator=generator) / math.sqrt(embedding_dim)
            self.projection.weight.copy_((WEIGHT_SCALE if config.common_start else 1.0) * columns)
            common = torch.randn(embedding_dim, generator=generator)
            self.projection.bias.copy_((BIAS_NORM if config.common_start else 0.0) * common / common.norm())
        if config.time_conditioned:
            self.time_embedding = nn.Parameter(torch.zeros(time_steps, embedding_dim))
        sizes = (rank, embedding_dim, generator)
        self._adapted = tuple(
            _AdaptedLayer(name, layer, LayerHypernetwork(layer.in_features, layer.out_features, *sizes))
            for name, layer in layers.items()
        )
        self.hypernetworks = nn.ModuleDict({item.name.replace(".", "/"): item.hypernetwork for item in self._adapted})
        factor = next(iter(self._adapted[0].layer.lora_A.values())).weight
        self.to(device=factor.device, dtype=factor.dtype)

    @property
    def acts(self) -> bool:
        """Whether it changes anything: an untrained one, whose every ``B_p`` is zero, does not."""
        halves = (b for item in self._adapted for b in (item.hypernetwork.b_weight, item.hypernetwork.b_bias))
        return any(bool(b.any()) for b in halves)

    def embed(self, q: Tensor, time_step: Tensor) -> Tensor:
        """``phi`` (B, d) of patients with soft assignments ``q`` (B, components) at time steps (B,) in 1..T."""
        phi = nn.functional.linear(q, self.projection.weight, self.projection.bias)
        if self.config.time_conditioned:
            phi = phi + nn.functional.embedding(time_step - 1, self.time_embedding)
        return phi

    @contextmanager
    def adapt(self, q: Tensor, time_step: Tensor) -> Iterator[None]:
        """Adapt the model to the B samples of one batch while the context is open.

        The leading dimension of any adapted layer's input must be B * k, with the k rows of a sample adjacent and the
        samples in the batch's order (slices, windows, beams); inputs have two or more dimensions. The context may be
        nested (the innermost batch counts) and always gives the layers back, also after an exception. With gradients
        off, each layer's factors are made once and kept until the context closes or gradients are on again, so neither
        these parameters nor the shared factors may be replaced meanwhile. Where layers are computed again in the
        backward pass (:mod:`fedtar_flare.models.recomputation`), a context opened with gradients on is good for one
        forward and backward pass; the latter may come after the context was left.

        Takes q (B, components), floating point, and time steps (B,), integers in 1..T, on any device. Raises DataError
        where they have another shape or range, or (in a layer's forward) the rows of an input are no multiple of B;
        ConfigError where the shared LoRA is merged into the base weights.
        """
        self._check(q, time_step)
        weight = self.projection.weight
        if self.config.constant_q:
            q = torch.full_like(q, 1 / self.config.components)
        batch = _Batch(q.to(weight), time_step.to(weight.device, torch.long))
        if torch.is_grad_enabled():
            with _full_precision(weight.device.type):
                self._phi(batch)  # before any layer, so that a layer computed again finds what it found at first
        replaced = [(item.layer, item.layer.__dict__.get("forward")) for item in self._adapted]
        try:
            for item in self._adapted:
                item.layer.forward = partial(self._forward, item, batch)
            yield
        finally:
            for layer, forward in replaced:
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = forward

    def _check(self, q: Tensor, time_step: Tensor) -> None:
        config = self.config
        if q.dim() != 2 or q.shape[0] < 1 or q.shape[1] != config.components or not q.is_floating_point():
            raise DataError(
                f"q is {q.dtype} of shape {tuple(q.shape)}: it must be floating point (B, {config.components})",
                reason="adapter-batch",
            )
        if time_step.shape != q.shape[:1] or time_step.is_floating_point() or time_step.is_complex():
            raise DataError(
                f"time_step is {time_step.dtype} of shape {tuple(time_step.shape)}: it must be integer "
                f"({q.shape[0]},), one time step for each row of q",
                reason="adapter-batch",
            )
        if int(time_step.min()) < 1 or int(time_step.max()) > self.time_steps:
            raise DataError(
                f"time_step reaches from {int(time_step.min())} to {int(time_step.max())}: it must lie in "
                f"1..{self.time_steps}",
                reason="adapter-batch",
            )
        for item in self._adapted:
            if item.layer.merged:
                raise ConfigError(
                    f"layer {item.name}: the shared LoRA is merged into the base weight; call unmerge_adapter() first"
                )

    def _forward(self, item: _AdaptedLayer, batch: _Batch, x: Tensor) -> Tensor:
        """One layer's pass: shared and patient part in one pair of products per sample (the rows of x in B groups)."""
        layer = item.layer
        if layer.disable_adapters:
            return layer.base_layer(x)
        samples = batch.q.shape[0]
        if x.dim() < 2 or x.shape[0] % samples:
            raise DataError(
                f"layer {item.name}: an input of shape {tuple(x.shape)} does not divide into the {samples} samples of "
                "this batch; its leading dimension must be a multiple of them (a layer that works on something else "
                "than samples does not belong into the LoRA targets)",
                reason="adapter-batch",
            )
        rows = x.reshape(samples, -1, x.shape[-1])
        base = layer.base_layer(rows)
        down, up = self._factors(item, batch, _compute_dtype(rows, item))
        low = torch.bmm(rows.to(down.dtype), down.transpose(1, 2))
        adapted = torch.baddbmm(base.to(up.dtype), low, up).to(base.dtype)
        return adapted.view(*x.shape[:-1], adapted.shape[-1])

    def _factors(self, item: _AdaptedLayer, batch: _Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Eq. 4's ``[A, A_p]^T`` (B, R + r, in) and ``[s B, s_p B_p]^T`` (B, R + r, out) of the batch, in ``dtype``."""
        key = (item.name, dtype)
        if torch.is_grad_enabled():
            batch.factors.clear()  # training may change the parameters before the next pass without gradients
        elif key in batch.factors:
            return batch.factors[key]
        layer, samples = item.layer, batch.q.shape[0]
        downs, ups = [], []
        with _full_precision(batch.q.device.type):
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    downs.append(layer.lora_A[name].weight.expand(samples, -1, -1))
                    ups.append((layer.lora_B[name].weight.t() * layer.scaling[name]).expand(samples, -1, -1))
            a, b = item.hypernetwork(self._phi(batch), self.config.scale)
            factors = (torch.cat([*downs, a], dim=1).to(dtype), torch.cat([*ups, b], dim=1).to(dtype))
        if not torch.is_grad_enabled():
            batch.factors[key] = factors
        return factors

    def _phi(self, batch: _Batch) -> Tensor:
        """``phi`` of the batch, shared by all layers; made anew where a backward pass used its graph up."""
        if batch.phi is None or (torch.is_grad_enabled() and not batch.phi.requires_grad):
            batch.phi = self.embed(batch.q, batch.time_step)
            if batch.phi.requires_grad:
                batch.phi.register_hook(lambda _: setattr(batch, "phi", None))
        return batch.phi


def _full_precision(device: str) -> AbstractContextManager[Any]:
    """Factors are small: full precision costs nothing, and spares autocast a copy of every hypernetwork."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _compute_dtype(x: Tensor, item: _AdaptedLayer) -> torch.dtype:
    """Autocast's precision where it is on, else that of the patient part (as PEFT, which follows its factors)."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return item.hypernetwork.a_weight.dtype


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound
