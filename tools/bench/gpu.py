"""An update of the paper-size model on a GPU, against the usual PEFT loop: ``python -m tools.bench --gpu``.

The model is CvT-21 at 384 pixels with a decoder of DistilGPT2's size, random weights, in bfloat16 autocast. "Ours" is
FedTAR's learner, from the images in its cache to the step of both optimisers; "plain" is the same model with PEFT's
shared LoRA, the batch already on the GPU, AdamW and clipping. "Sharing" runs ours in :data:`SITES` processes at once,
as sites of one machine do: milliseconds of the slowest, reports and gigabytes of all. No row begins after
:data:`PATIENCE` seconds.
"""

import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.imaging.pipeline import prepare_cohort
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import fit_mixture
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import ModelConfig, preset
from fedtar_flare.synthetic.cohort import synthetic_cohort

PATIENCE, STEPS, WORDS, SITES = 200.0, 3, 60, 3
_PAPER: dict[str, Any] = {
    "encoder_name": None,
    "decoder_name": None,
    "encoder_config": {"embed_dim": (64, 192, 384), "depth": (1, 4, 16), "num_heads": (1, 3, 6), "mlp_ratio": 4.0},
    "decoder_config": {"n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 1024},
    "tokenizer": "small",
    "weights": "random",
}
_BARRIER: list[Any] = []
"""In a process of :meth:`Bench.sharing`: the barrier at which all wait before they begin."""


class Bench:
    """The measurements, each a row of the results.

    Parameters
    ----------
    tiny : bool
        Run a tiny model on the CPU, to show that the bench runs.
    folder : Path
        For prepared images.
    launches : bool
        Count launches of kernels.
    """

    def __init__(self, tiny: bool, folder: Path, launches: bool = True):
        self.tiny, self.folder, self.launches = tiny, folder, launches
        self.device = "cpu" if tiny else "cuda"
        self.sizes: tuple[int, ...] = (2, 3) if tiny else (8, 32, 96)
        self.repetitions = 2 if tiny else 10
        self.config: ModelConfig = preset("tiny") if tiny else preset("paper", **_PAPER)
        self.cohort = prepared_cohort(self.config, 8, folder)
        self.rows: list[dict[str, Any]] = []
        self._begun = time.perf_counter()

    def run(self, save: Callable[[], None]) -> None:
        """Measure all rows, the most important first, and ``save`` after each."""
        learner, compiled = self.learner(), self.learner()
        vars(compiled)["tokens"] = lambda samples, images: None  # the encoder is part of the graph
        vars(compiled.generator)["forward"] = torch.compile(compiled.generator.forward)
        kinds: list[tuple[str, Callable[[int], dict[str, Any]], Sequence[int]]] = []
        for size in self.sizes:  # one after the other, so that both meet the machine in the same state
            kinds += [("plain", self.plain, (size,)), ("ours", partial(self.ours, learner), (size,))]
        kinds += [
            ("reading", partial(self.reading, learner), self.sizes),
            ("writing", partial(self.writing, learner, True), self.sizes[1:2]),
            ("writing without", partial(self.writing, learner, False), self.sizes[1:2]),
            ("sharing", self.sharing, self.sizes[:1]),
        ]
        if self.device == "cuda":  # on a CPU that takes ten minutes, whatever the size
            kinds.append(("ours compiled", partial(self.ours, compiled), self.sizes[:2]))
            kinds.append(("plain compiled", partial(self.plain, compiled=True), self.sizes[:2]))
        for kind, measure, sizes in kinds:
            for size in sizes:
                row: dict[str, Any] = {"what": kind, "reports": size}
                late = time.perf_counter() - self._begun > PATIENCE
                try:
                    self.rows.append(row | ({"left_out": "no time"} if late else measure(size)))
                except (torch.OutOfMemoryError, RuntimeError, multiprocessing.TimeoutError) as error:
                    self.rows.append(row | {"left_out": f"{type(error).__name__}: {str(error)[:300]}"})
                print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)
                save()

    def learner(self) -> PatientLearner:
        """FedTAR's learner, with the paper's patient part."""
        patient = PatientConfig(components=16, patients_per_component=1)
        return PatientLearner(
            model=self.config,
            lora=LoRAConfig(),
            training=TrainingConfig(lr=1e-5, batch_size=max(self.sizes)),  # no micro-batches
            patient=patient,
            mixture=fit_mixture(self.cohort, patient, 0),
            cohort=self.cohort,
            seed=0,
            device=self.device,
            precision="bfloat16" if self.device == "cuda" else "float32",
        )

    def samples(self, size: int) -> list[Sample]:
        """``size`` visits, some of them repeated where the cohort has fewer."""
        known = self.cohort.samples("train")
        return [known[i % len(known)] for i in range(size)]

    def ours(self, learner: PatientLearner, size: int) -> dict[str, Any]:
        """FedTAR's update."""
        optimizer, start = learner.shared_optimizer(list(learner.shared_parameters.values()), 1.0), learner.shared()
        samples = self.samples(size)
        return self._timed(lambda: learner.local_update(samples, "0", optimizer, start), size)

    def plain(self, size: int, compiled: bool = False) -> dict[str, Any]:
        """The usual PEFT loop's update."""
        from peft import LoraConfig, get_peft_model

        from fedtar_flare.models.adapters.lora import target_names

        learner = self.learner()  # for its tokenizer and its images
        built = build_model(self.config)
        names = target_names(built, self.config.lora_targets)
        config = LoraConfig(r=4, lora_alpha=128, lora_dropout=0.0, target_modules=names)
        model = get_peft_model(built, config).to(self.device)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=self.device == "cuda")
        samples = self.samples(size)
        images = learner.images(samples)
        ids, labels = (part.to(self.device) for part in learner.tokenizer.batch([s.visit.report for s in samples]))
        forward = model.get_base_model().forward
        forward = torch.compile(forward) if compiled else forward

        def update() -> None:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                loss = forward(images, ids, labels).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return self._timed(update, size) | {"tokens": ids.shape[1]}

    def reading(self, learner: PatientLearner, size: int) -> dict[str, Any]:
        """Images from the cache to the GPU."""
        samples = self.samples(size)
        return self._timed(lambda: learner.images(samples), size, launches=False)

    def writing(self, learner: PatientLearner, personal: bool, size: int) -> dict[str, Any]:
        """Beam search of :data:`WORDS` tokens."""
        generator, samples = learner.generator, self.samples(size)
        generator.max_length = min(WORDS, self.config.max_length)
        generator.eos_id = generator.pad_id = generator.bos_id
        head = generator.decoder.lm_head
        bias = torch.zeros(head.out_features, device=self.device)
        bias[generator.bos_id] = -1e4  # never the end
        head.bias = torch.nn.Parameter(bias, requires_grad=False)
        images = learner.images(samples)
        return self._timed(lambda: learner.generate(samples, images, personal), size, repetitions=2, launches=False)

    def sharing(self, size: int) -> dict[str, Any]:
        """FedTAR's updates in several processes at once."""
        context = multiprocessing.get_context("spawn")
        with context.Pool(SITES, _share, (context.Barrier(SITES),)) as pool:
            work = pool.starmap_async(_site, [(self.tiny, self.folder, size)] * SITES, chunksize=1)
            rows = work.get(PATIENCE / 2)
        sums = {key: round(sum(row[key] for row in rows), 2) for key in ("reports_per_s", "peak_gb") if key in rows[0]}
        return {key: max(row[key] for row in rows) for key in ("ms", "least_ms", "first_s")} | sums

    def _timed(
        self, run: Callable[[], Any], size: int, repetitions: int | None = None, launches: bool = True
    ) -> dict[str, Any]:
        """Milliseconds, gigabytes at the peak and kernel launches of a run, after two that are not timed."""
        cuda = self.device == "cuda"
        seconds = []
        if cuda:
            gc.collect()  # models of earlier rows hold circular references, and would fill the memory
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2 + (repetitions or self.repetitions)):
            start = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        row = {
            "ms": round(1e3 * statistics.median(seconds[2:]), 1),
            "least_ms": round(1e3 * min(seconds[2:]), 1),
            "first_s": round(seconds[0], 1),
            "reports_per_s": round(size / statistics.median(seconds[2:]), 1),
        }
        if cuda:
            row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if cuda and launches and self.launches and size == self.sizes[0]:  # the same for all sizes, and slow to count
            row["launches"] = _launches(run)
        return row


def _share(barrier: Any) -> None:
    _BARRIER.append(barrier)


def _site(tiny: bool, folder: Path, size: int) -> dict[str, Any]:
    """Measure in a process whose updates begin together with those of the others."""
    bench = Bench(tiny, folder, launches=False)
    learner = bench.learner()
    _BARRIER[0].wait()
    return bench.ours(learner, size)


def _launches(run: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if "LaunchKernel" in event.key)


def prepared_cohort(config: ModelConfig, patients: int, folder: Path) -> Cohort:
    """A synthetic site's cohort, its images prepared."""
    cohort = synthetic_cohort("site-1", folder=folder, patients=patients, timeline=Timeline(STEPS), seed=0)
    return prepare_cohort(cohort, config, folder / "prepared")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table: a line for each kind and number of reports, with the ratio to plain PEFT."""
    plain = {row["reports"]: row["ms"] for row in rows if row["what"] == "plain" and "ms" in row}
    keys = ("ms", "least_ms", "reports_per_s", "peak_gb", "launches", "first_s")
    lines = [f"| what | reports | {' | '.join(keys)} | times plain |", "|---|" + "---:|" * (len(keys) + 2)]
    for row in rows:
        cells = [str(row.get(key, "")) for key in keys] if "ms" in row else [row["left_out"], *[""] * (len(keys) - 1)]
        compared = row["what"].split()[0] in ("ours", "plain") and "ms" in row and row["reports"] in plain
        ratio = f"{row['ms'] / plain[row['reports']]:.2f}" if compared else ""
        lines.append(f"| {row['what']} | {row['reports']} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def main(tiny: bool, file: Path, machine: dict[str, Any]) -> int:
    """Measure, print the table, and write one JSON file."""
    if not tiny and not torch.cuda.is_available():
        print("not measured: torch sees no GPU here (--gpu --tiny shows on the CPU that the bench runs)")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(tiny, Path(folder))

        def save() -> None:
            file.write_text(json.dumps({"machine": machine, "tiny": tiny, "rows": bench.rows}, indent=1), "utf-8")

        bench.run(save)
    print(table(bench.rows))
    return 0
