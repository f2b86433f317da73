"""Patient-adaptive LoRA: every sample of a batch has low-rank factors of its own (paper, Eq. 4).

A layer that PEFT adapts, with frozen weight ``W`` and shared factors ``A``, ``B``, becomes for sample ``p`` ::

    W + s A B^T + s_p A_p B_p^T,   [A_p, B_p] = h_l(phi_p),   phi_p = W_proj q_p + b_proj (+ e_t)

with ``q_p`` the soft assignment of the patient to the site's clusters, ``h_l`` one linear hypernetwork per layer and
``e_t`` a learned embedding of the time step (the paper's form is ``time_conditioned=False``). The shared factors
travel; everything that :class:`PatientLoRA` owns is the site's own state and stays.

On a GPU a small model's step is bound by the number of kernels, so the ``h_l`` are rows of one linear map, and all
factors are laid out for all layers at once: a layer costs its own product and two more.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.methods.fedtar.config import EMBEDDING_DIM, PatientConfig
from fedtar_flare.models.adapters.lora import lora_layers
from fedtar_flare.models.adapters.visit_shares import VisitShares

if TYPE_CHECKING:
    from peft import PeftModel

BIAS_NORM, WEIGHT_SCALE = 1.0, 0.1
"""Length of b_proj, a random vector, and of W_proj's columns at a common start; the paper's are 0 and 1."""
# The patient's A starts near one common random A: this is the size of its patient-dependent share.
_PATIENT_SHARE_OF_A = 0.1

_STATE = ("forward", "patient_batch")
"""Attributes that a context sets on the layers; :mod:`fedtar_flare.models.recomputation` saves them."""


@dataclass
class _Batch:
    """The samples of one ``adapt`` context, and the layers' factors by their precision and whether gradients are on."""

    q: Tensor
    time_step: Tensor
    acts: Tensor | None = None
    factors: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


class PatientLoRA(nn.Module):
    """The patient part of every LoRA layer of a PEFT model; ``rank`` is r of A_p and B_p, ``embedding_dim`` d of phi.

    It is not a submodule of the PEFT model: its ``state_dict()`` is exactly the site's private state, with names
    ``projection.*``, ``time_embedding`` and ``hypernetworks.{weight,bias}``, whose rows make ``A_p^T`` of each layer,
    sorted by its path, then ``B_p^T`` of each. Inside :meth:`adapt` each LoRA layer runs one fused pass for the shared
    and the patient part; outside of it PEFT's own forward, the shared part alone.
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

        self.projection = nn.utils.skip_init(nn.Linear, config.q_length, embedding_dim)
        with torch.no_grad():
            # phi starts near one vector that all patients share: far apart, each cluster would get an adapter of its
            # own, which remembers the findings of its few patients
            columns = torch.randn(self.projection.weight.shape, generator=generator) / math.sqrt(embedding_dim)
            self.projection.weight.copy_((WEIGHT_SCALE if config.common_start else 1.0) * columns)
            common = torch.randn(embedding_dim, generator=generator)
            self.projection.bias.copy_((BIAS_NORM if config.common_start else 0.0) * common / common.norm())
        if config.time_conditioned:
            self.time_embedding = nn.Parameter(torch.zeros(time_steps, embedding_dim))
        self._layers = tuple(layers.items())
        self.shares: VisitShares | None = None
        """What keeps visits equal in the shared factors' gradients, where a site has patients."""
        # made once, so that torch.compile need not trace them anew for each batch
        self._passes = [partial(PatientLoRA._forward, self, index) for index in range(len(layers))]
        self._sizes = tuple(
            [rank * getattr(layer, side) for layer in layers.values()] for side in ("in_features", "out_features")
        )
        self.hypernetworks = nn.utils.skip_init(nn.Linear, embedding_dim, sum(map(sum, self._sizes)))
        with torch.no_grad():
            # B_p is zero at the start, so that an untrained patient part changes nothing; A_p starts like LoRA's own A
            # (Kaiming uniform) in its bias, with a small patient-dependent share.
            values = (value.zero_().split(self._sizes[0] + self._sizes[1]) for value in self.hypernetworks.parameters())
            for layer, *halves in zip(layers.values(), *values, strict=False):
                bound = 1 / math.sqrt(layer.in_features)
                for half, size in zip(halves, (_PATIENT_SHARE_OF_A * bound, bound), strict=True):
                    half.copy_((torch.rand(half.shape, generator=generator) * 2 - 1) * size)
            for layer in layers.values():
                for factor in layer.lora_B.values():
                    factor.weight.data = factor.weight.t().contiguous().t()  # by rank, as it is laid out in a pass
        self.to(device=factor.weight.device, dtype=factor.weight.dtype)

    @property
    def acts(self) -> bool:
        """Whether it changes any output: not before training, when every ``B_p`` is zero."""
        first = sum(self._sizes[0])
        return any(bool(values[first:].any()) for values in self.hypernetworks.parameters())

    def embed(self, q: Tensor, time_step: Tensor) -> Tensor:
        """``phi`` (B, d) of soft assignments ``q`` (B, q_length) at time steps (B,), integers in 1..T."""
        phi = nn.functional.linear(q, self.projection.weight, self.projection.bias)
        if self.config.time_conditioned:
            phi = phi + nn.functional.embedding(time_step - 1, self.time_embedding)
        return phi

    @contextmanager
    def adapt(self, q: Tensor, time_step: Tensor, acts: Tensor | None = None) -> Iterator[None]:
        """Adapt the model to the B samples of one batch while the context is open.

        Samples whose ``acts`` (B,) is 0 have the shared part alone.

        The leading dimension of any adapted layer's input must be B * k, with the k rows of a sample adjacent and the
        samples in the batch's order (slices, windows, beams); else the layer's forward raises DataError
        ``adapter-batch``. In nested contexts the innermost batch counts. The factors are made once, for all layers,
        and last until a backward pass has gone through them or the context closes: neither these parameters nor the
        shared factors may be replaced meanwhile. Opened with gradients on, it makes them at once, and the backward pass
        may come after the context was left. Raises ConfigError where the shared LoRA is merged into the base weights.
        """
        for name, layer in self._layers:
            if layer.merged:
                raise ConfigError(f"layer {name}: the shared LoRA is merged into the base weight")
        weight = self.projection.weight
        if self.config.constant_q:
            q = torch.full_like(q, 1 / self.config.q_length)
        batch = _Batch(q.to(weight), time_step.to(weight.device, torch.long), acts if acts is None else acts.to(weight))
        if torch.is_grad_enabled():
            self._factors(batch)  # before any layer, so that a layer computed again finds what it found at first
        before = []
        for index, (_, layer) in enumerate(self._layers):
            before.append(tuple(map(layer.__dict__.get, _STATE)))
            layer.__dict__.update(forward=self._passes[index], patient_batch=batch)
        try:
            yield
        finally:
            for (_, layer), outer in zip(self._layers, before, strict=True):
                for name, value in zip(_STATE, outer, strict=True):
                    if value is None:
                        del layer.__dict__[name]
                    else:
                        layer.__dict__[name] = value

    def _forward(self, index: int, x: Tensor) -> Tensor:
        """One layer's pass: shared and patient part in one pair of products per sample (the rows of x in B groups)."""
        name, layer = self._layers[index]
        if layer.disable_adapters:
            return layer.base_layer(x)
        batch: _Batch = layer.patient_batch
        samples = batch.q.shape[0]
        if x.dim() < 2 or x.shape[0] % samples:
            text = f"layer {name}: an input of shape {tuple(x.shape)} does not divide into {samples} samples"
            raise DataError(f"{text}: leave the layer out of the LoRA targets", reason="adapter-batch")
        down, up = self._factors(batch)[index]
        rows = x.reshape(samples, -1, x.shape[-1])
        if torch.is_autocast_enabled(x.device.type):
            rows = rows.to(down.dtype)  # once, for both products
        # of a single visit, gradients of a convolution before this layer came out wrong where its output was reshaped
        base = layer.base_layer(x).view(1, rows.shape[1], -1) if samples == 1 else layer.base_layer(rows)
        low = torch.bmm(rows.to(down.dtype), down.transpose(1, 2))
        adapted = torch.baddbmm(base.to(up.dtype), low, up).to(base.dtype)
        return adapted.view(*x.shape[:-1], adapted.shape[-1])

    def _factors(self, batch: _Batch) -> list[tuple[Tensor, Tensor]]:
        """Eq. 4's ``[A, A_p]^T`` (B, R + r, in) and ``[s B, s_p B_p]^T`` (B, R + r, out) of every layer."""
        device = batch.q.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else batch.q.dtype
        key = (dtype, torch.is_grad_enabled())
        if key in batch.factors:
            return batch.factors[key]
        # they are small: full precision costs nothing, and spares autocast a copy of every hypernetwork
        with torch.autocast(device, enabled=False):
            patients = self.hypernetworks(self.embed(batch.q, batch.time_step))
            if patients.requires_grad:
                # when a backward pass comes here, it has used the graph up; a graph must not keep alive what keeps it
                patients.register_hook(partial(_forget, weakref.ref(batch)))
            a_p, b_p = patients.split(list(map(sum, self._sizes)), 1)
            b_p = b_p if batch.acts is None else b_p * batch.acts[:, None]
            scale = 0.0  # s of the first active adapter; the others' B are scaled to it
            downs: list[list[Tensor]] = []
            ups: list[list[Tensor]] = []
            for _, layer in self._layers:
                active = [name for name in layer.active_adapters if name in layer.lora_A]
                downs.append([layer.lora_A[name].weight for name in active])
                ups.append([])
                for name in active:
                    scale = scale or layer.scaling[name]
                    factor, ratio = layer.lora_B[name].weight.t(), layer.scaling[name] / (scale or 1.0)
                    ups[-1].append(factor if ratio == 1 else factor * ratio)
            down = self._laid_out(downs, 1.0, a_p, 0, dtype)
            up = self._laid_out(ups, scale or 1.0, self.config.scale * b_p, 1, dtype)
        batch.factors[key] = list(zip(down, up, strict=True))
        return batch.factors[key]

    def _laid_out(
        self, shared: Sequence[Sequence[Tensor]], scale: float, patients: Tensor, side: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """(B, R + r, width) of every layer: its shared factors times ``scale`` above those of ``patients`` (B, n)."""
        flat, sizes = [patients[0, :0]], []
        for factors in shared:
            flat.extend(map(torch.flatten, factors))
            sizes.append(sum(map(torch.numel, factors)))
        joined, visits = torch.cat(flat), len(patients)
        if self.shares is not None:
            each = self.shares.each(joined, visits, side) * scale
        else:
            each = (joined * scale if scale != 1 else joined).expand(visits, -1)
        theirs = self._sizes[side]
        parts = zip(each.split(sizes, 1), patients.split(theirs, 1), strict=True)
        joint = torch.cat(list(chain.from_iterable(parts)), 1).to(dtype)
        layers = zip(joint.split(list(map(add, sizes, theirs)), 1), theirs, strict=True)
        return [part.view(len(patients), -1, size // self.rank) for part, size in layers]


def _forget(batch: weakref.ref[_Batch], _: Tensor) -> None:
    if (alive := batch()) is not None:
        alive.factors.clear()
