"""Speed of the fused per-sample pass: `pytest -m benchmark -s tests/benchmarks/test_bench_patient_lora.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtar_flare.fedtar.patient_lora import PatientLoRA, PatientLoRAConfig
from fedtar_flare.models.adapters.lora import add_lora

pytestmark = pytest.mark.benchmark

WIDTH, LENGTH, RANK, LAYERS = 768, 128, 4, 4
Context = Callable[[], AbstractContextManager[Any]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def milliseconds(run: Callable[[], Any], repetitions: int = 7) -> float:
    """Median of several runs, after two that warm up."""
    times = []
    for repetition in range(repetitions + 2):
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if repetition >= 2:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


@contextmanager
def unfused(patient: PatientLoRA, q: Tensor, step: Tensor) -> Any:
    """The same map the plain way: PEFT's own forward, then the patient's factors, made at every call, on top."""
    layers = [(item.layer, item.hypernetwork) for item in patient._adapted]
    for layer, hypernetwork in layers:
        pefts = layer.forward

        def forward(x: Tensor, pefts: Any = pefts, hypernetwork: Any = hypernetwork) -> Tensor:
            a, b = hypernetwork(patient.embed(q, step), patient.config.scale)
            rows = x.reshape(len(q), -1, x.shape[-1])
            return pefts(x) + torch.bmm(torch.bmm(rows, a.transpose(1, 2)), b).view(*x.shape[:-1], -1)

        layer.forward = forward
    try:
        yield
    finally:
        for layer, _ in layers:
            del layer.forward


def test_fused_unfused_and_shared_alone() -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    peft_model = add_lora(model, targets=r"\d+", rank=RANK, seed=0).to(DEVICE)
    patient = PatientLoRA(peft_model, PatientLoRAConfig(rank=RANK, time_steps=4, seed=0))
    parameters = [p for p in (*peft_model.parameters(), *patient.parameters()) if p.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.01 * torch.randn_like(parameter))

    def train(x: Tensor, context: Context) -> None:
        with context():
            loss = peft_model(x).square().mean()
        loss.backward()

    def decode(x: Tensor, context: Context) -> None:
        with torch.no_grad(), context():
            for _ in range(30):
                peft_model(x)

    print(f"\n{LAYERS} layers, e={WIDTH}, r={RANK}, {DEVICE}, {torch.get_num_threads()} threads; milliseconds")
    print(f"{'':38}{'shared':>9}{'unfused':>9}{'fused':>9}{'fused/shared':>14}")
    for samples in (8, 16, 32):
        q = torch.softmax(torch.randn(samples, 16), 1).to(DEVICE)
        step = torch.arange(samples, device=DEVICE) % 4 + 1
        contexts: tuple[Context, ...] = (
            nullcontext,
            partial(unfused, patient, q, step),
            partial(patient.adapt, q, step),
        )
        sequence = torch.randn(samples, LENGTH, WIDTH, device=DEVICE)
        with patient.adapt(q, step):
            fused_output = peft_model(sequence)
        with unfused(patient, q, step):
            torch.testing.assert_close(peft_model(sequence), fused_output, rtol=1e-3, atol=1e-3)
        beams = torch.randn(4 * samples, 1, WIDTH, device=DEVICE)
        for label, run, x in (
            (f"N={samples}, L={LENGTH}, forward + backward", train, sequence),
            (f"N={samples}, 4 beams, 30 tokens, no grad", decode, beams),
        ):
            shared, plain, fused = (milliseconds(partial(run, x, context)) for context in contexts)
            print(f"{label:38}{shared:9.1f}{plain:9.1f}{fused:9.1f}{fused / shared:14.2f}")
