"""One local update written out by hand, without PEFT; which half moves what; micro-batches; two processes."""

import copy
import math
import re
from itertools import pairwise

import pytest
import torch
from adapted_models import shake
from tables import cases
from torch.nn import functional as F

from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.transform_list import built_in
from fedtar_flare.learning.inputs import augmented
from fedtar_flare.learning.labels import labeler
from fedtar_flare.methods.fedmrg.dual_adapter import BROADCAST, GENERIC, SPECIALISED, copy_broadcast, mixed_model
from fedtar_flare.methods.fedmrg.losses import contrast_losses, distill_losses, features
from fedtar_flare.methods.fedmrg.section import PARTS
from fedtar_flare.models.adapters.lora import shared_state
from fedtar_flare.models.report_generator import Encoded

SCALE = 32.0  # alpha 128 by rank 4


def shaken(learner, size=0.05):
    shake(learner.model, size)
    return learner


class ByHand:
    """The losses of one batch by a copy of the base model whose adapted weights are written in."""

    def __init__(self, learner, samples, seed):
        self.learner, self.samples = learner, samples
        self.settings = learner._fedmrg
        self.images = learner.images(samples, seed)
        changes = built_in(learner._config.image_size)
        self.view = collate(augmented(learner.prepared(samples), samples, f"{seed}/view", changes))
        self.ids, self.labels = learner.tokenizer.batch([s.visit.report for s in samples])
        self.classes = torch.tensor([labeler("synthetic").label(s.visit.report) for s in samples])

    def model(self, deltas):
        """The base model with the sets that act, each ``name of set: share``, written into it; and their factors."""
        base = copy.deepcopy(self.learner.model).get_base_model()
        layers = {n: m for n, m in base.named_modules() if hasattr(m, "lora_A")}
        leaves = {}
        for name, layer in layers.items():
            parent = base.get_submodule(name.rpartition(".")[0])
            plain = layer.base_layer
            weight = plain.weight.detach()
            for adapter in deltas:
                a = layer.lora_A[adapter].weight.detach().clone().requires_grad_()
                b = layer.lora_B[adapter].weight.detach().clone().requires_grad_()
                leaves[adapter, name] = (a, b)
                delta = SCALE * deltas[adapter] * (b @ a)
                weight = weight + (delta.T if type(plain).__name__ == "Conv1D" else delta)
            del plain.weight
            plain.weight = weight
            setattr(parent, name.rpartition(".")[2], plain)
        return base, leaves

    def unit_features(self, base, images):
        tokens = base.tokens(images)
        rows = [tokens[b][images.slice_mask[b]].reshape(-1, tokens.shape[-1]).mean(0) for b in range(len(tokens))]
        return tokens, torch.stack([row / row.norm() for row in rows])

    def run(self, base, tokens):
        memory, mask = base.memory(self.images, Encoded(tokens, self.images.slice_mask))
        return base.decode(memory, mask, self.ids, base.diagnosis.embed(self.classes))

    def loss(self, student, teacher):
        base, leaves = self.model(student)
        tokens, u = self.unit_features(base, self.images)
        logits, states = self.run(base, tokens)
        with torch.no_grad():
            taught, teaching = self.run(self.model(teacher)[0], tokens.detach())
        entropy = F.cross_entropy(logits[:, :-1].transpose(1, 2), self.labels[:, 1:], reduction="none")
        language = torch.stack([e[at[1:] != -100].mean() for e, at in zip(entropy, self.labels, strict=True)])
        distillation = distill_losses(states, logits, teaching, taught, self.labels)
        head = base.diagnosis(tokens, self.images.slice_mask)
        diagnosis = F.cross_entropy(head.flatten(0, 1), self.classes.flatten())
        _, v = self.unit_features(base, self.view)
        names = [s.visit.patient_id for s in self.samples]
        patients = torch.tensor([names.index(name) for name in names])
        contrast = contrast_losses(u, v, patients, self.learner.bank.rows, temperature=0.07)
        s = self.settings
        weight = s.l2g_weight if SPECIALISED in teacher else s.g2l_weight
        total = language + s.contrast_weight * contrast + weight * distillation
        return total.mean() + diagnosis, base, leaves


@pytest.mark.parametrize(
    ("half", "micro_batch"), [("generic", 0), ("specialised", 0), ("generic", 3), ("specialised", 1)]
)
def test_loss_and_gradients_of_a_half_are_those_written_out_by_hand(learner_of, half, micro_batch):
    """Also of a batch in parts, whose contrast is the whole batch's."""
    training = {"micro_batch": micro_batch}
    learner = shaken(learner_of(training, contrast_weight=0.1, l2g_weight=0.5, g2l_weight=0.3))
    copy_broadcast(learner.model)
    learner.bank.rows = F.normalize(torch.randn(3, 32, generator=torch.Generator().manual_seed(4)), dim=1)
    shaken(learner, 0.01)  # Q is not G any more
    samples = learner.cohort.samples("train")[:4]
    learner._half = half
    loss = float(learner._accumulate(samples, "s"))
    sets = ({GENERIC: 1.0}, {BROADCAST: 1.0, SPECIALISED: 1.0})
    student, teacher = sets if half == "generic" else sets[::-1]
    expected, base, leaves = ByHand(learner, samples, "s").loss(student, teacher)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    moved, still = (GENERIC, SPECIALISED) if half == "generic" else (SPECIALISED, GENERIC)
    for name, parameter in learner.model.get_base_model().named_parameters():
        if f".{moved}." in name and ".lora_" in name:
            path, _, rest = name.partition(".lora_")
            wanted = leaves[moved, path][rest[0] == "B"].grad
        elif ".lora_" in name:
            assert parameter.grad is None, f"{name}: {still} and Q are not moved in this half"
            continue
        elif name.startswith(("encoder.", "pooling.", "projection.", "diagnosis.")):
            wanted = dict(base.named_parameters())[name].grad
        else:
            assert parameter.grad is None, f"{name} is frozen"
            continue
        torch.testing.assert_close(parameter.grad, wanted, rtol=2e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_the_model_of_drafts_is_its_formula(learner_of, mix):
    learner = shaken(learner_of())
    by_hand, model = ByHand(learner, learner.cohort.samples("train")[:2], "s"), learner.model.get_base_model()
    with torch.no_grad():
        tokens = model.tokens(by_hand.images)
        expected, _ = by_hand.run(by_hand.model({GENERIC: 1.0, SPECIALISED: 1 - mix})[0], tokens)
        with mixed_model(learner.model, mix):
            logits, _ = by_hand.run(model, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_each_half_moves_its_own_adapter_and_nothing_else_to_the_bit(learner_of):
    learner = shaken(learner_of())
    copy_broadcast(learner.model)
    generic, broadcast = (shared_state(learner.model, adapter) for adapter in (GENERIC, BROADCAST))
    assert broadcast and all(torch.equal(v, generic[n.replace(BROADCAST, GENERIC)]) for n, v in broadcast.items())
    seen = []

    class Watched(type(learner)):
        def _accumulate(self, samples, training_seed=None):
            seen.append({n: p.detach().clone() for n, p in self.model.named_parameters()})
            return super()._accumulate(samples, training_seed)

    learner.__class__ = Watched
    optimizer = learner.shared_optimizer([], 1.0)
    learner.local_update(learner.cohort.samples("train")[:4], "s", optimizer, {})
    seen.append({n: p.detach() for n, p in learner.model.named_parameters()})
    moved = [{n for n in a if not torch.equal(a[n], b[n])} for a, b in pairwise(seen)]
    kind = re.compile(r"\.(generic|broadcast|specialised)\.|model\.(encoder|pooling|projection|diagnosis)\.")
    kinds = [{kind.search(name)[1] or "theta" for name in names} for names in moved]
    assert kinds == [{GENERIC, "theta"}, {SPECIALISED, "theta"}]


def test_a_task_done_again_gives_the_same_bits_and_its_state_is_all_that_it_needs(learner_of):
    learner = learner_of()
    start, state = learner.shared(), {n: v.clone() for n, v in learner.private().items()}
    first = learner.train(None, 7)
    end = {n: v.clone() for n, v in learner.private().items()}
    for again in (learner, learner_of()):
        again.load_shared(start)
        again.load_private(state)
        second = again.train(None, 7)
        assert all(torch.equal(v, second.update[n]) for n, v in first.update.items())
        assert all(torch.equal(v, again.private()[n]) for n, v in end.items())
    assert set(first.parts["loss_parts"]) == {*PARTS}
    assert first.loss == pytest.approx(first.parts["loss_parts"]["language_generic"])
    assert not any(SPECIALISED in name or BROADCAST in name for name in first.update)
    assert learner.personal_part_acts and not learner_of().personal_part_acts


def test_validation_is_of_the_generic_model_and_scores_are_of_both(learner_of):
    learner = shaken(learner_of())
    generic = learner.validate().loss
    samples = learner.cohort.samples("validation")
    with torch.no_grad():
        losses = {p: learner.report_losses(samples, learner.images(samples), p).mean() for p in (True, False)}
    assert generic == pytest.approx(float(losses[False])) and generic != pytest.approx(float(losses[True]))


def test_a_frozen_backbone_sends_adapter_and_branch_alone_and_has_no_contrast(learner_of):
    learner = learner_of(exchange=("diagnosis.*",), backbone="frozen")
    trained = learner.train(None, 1, updates=1)
    assert all(name.startswith(("base_model.", "diagnosis.")) for name in trained.update)
    assert "contrast" not in trained.parts["loss_parts"]


@pytest.mark.parametrize(("settings", "left_out"), cases(__file__, "cases.yaml")["table iv"])
def test_each_part_of_table_iv_is_taken_out_alone(learner_of, settings, left_out):
    parts = "encoder|pooling|projection" + ("" if "labeler" in settings else "|diagnosis")
    learner = learner_of(exchange=[f"{part}.*" for part in parts.split("|")], **settings)
    parts = learner.train(None, 1, updates=1).parts["loss_parts"]
    assert {*PARTS} - {*parts} == {*left_out}
    assert learner.personal_part_acts is settings.get("specialised", True)


@pytest.mark.parametrize(("prompts", "heeds"), [("none", False), ("paper", True)])
def test_without_prompts_the_decoder_reads_none_and_the_branch_still_learns(learner_of, prompts, heeds):
    learner = learner_of(prompts=prompts)
    samples = learner.cohort.samples("train")[:3]
    before, head = learner.report_losses(samples, learner.images(samples)), learner.generator.diagnosis.head.weight
    start = head.detach().clone()
    with torch.no_grad():
        learner.generator.diagnosis.embeddings.normal_(generator=torch.Generator().manual_seed(1))
        assert torch.equal(learner.report_losses(samples, learner.images(samples)), before) is not heeds
    learner.train(None, 1, updates=1)
    assert not torch.equal(head, start), "L_CE"


B, L, E, V = 3, 6, 4, 9


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_loops(u, v, patients, bank, tau):
    losses = []
    for i in range(len(u)):
        others = [a for a in range(len(u)) if patients[a] != patients[i]]
        against = [u[a] for a in others] + [v[a] for a in others] + list(bank)
        if not against:
            losses.append(torch.zeros((), dtype=u.dtype))
            continue
        total = sum(math.exp(float(u[i] @ z) / tau) for z in against)
        losses.append(-(u[i] @ v[i]) / tau + math.log(total))
    return torch.stack(losses)


CASES = [(4, 3, [0, 1, 2, 3]), (5, 0, [0, 0, 1, 1, 2]), (3, 2, [7, 7, 7]), (1, 4, [0]), (1, 0, [0]), (2, 0, [3, 3])]


@pytest.mark.parametrize(("n", "m", "patients"), CASES)
def test_it_is_the_double_loop_and_finite_with_its_gradient(n, m, patients):
    u, v, bank = (F.normalize(normal(count, 5, seed=seed)) for count, seed in ((n, 0), (n, 1), (m, 0)))
    ids = torch.tensor(patients)
    u.requires_grad_()
    losses = contrast_losses(u, v, ids, bank, temperature=0.3)
    expected = by_loops(u.detach(), v, patients, bank, 0.3)
    torch.testing.assert_close(losses.detach(), expected, rtol=0, atol=1e-12)
    losses.sum().backward()
    assert torch.isfinite(u.grad).all()


def test_features_are_unit_means_over_tokens_and_slices_that_are_there():
    tokens, mask = normal(2, 3, 4, 5), torch.tensor([[True, True, False], [True, True, True]])
    result = features(tokens, mask)
    by_hand = [tokens[0, :2].reshape(-1, 5).mean(0), tokens[1].reshape(-1, 5).mean(0)]
    for row, mean in zip(result, by_hand, strict=True):
        torch.testing.assert_close(row, (mean / mean.norm()).float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("with_states", [True, False])
def test_distillation_is_torch_s_cosine_and_divergence_token_by_token(with_states):
    labels = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(5))
    labels[1, 4:] = labels[2, 2:] = -100
    widths = enumerate((E, V, E, V), 1)
    states, logits, t_states, t_logits = (normal(B, L, width, seed=i).float() for i, width in widths)
    result = distill_losses(states, logits, t_states, t_logits, labels, with_states)
    for b in range(B):
        tokens = []
        for i in range(L - 1):
            if labels[b, i + 1] == -100:
                continue
            cosine = F.cosine_embedding_loss(states[b, i][None], t_states[b, i][None], torch.ones(1))
            own, taught = logits[b, i].log_softmax(0), t_logits[b, i].log_softmax(0)
            tokens.append(with_states * cosine + F.kl_div(own, taught, log_target=True, reduction="sum"))
        assert float(result[b]) == pytest.approx(float(sum(tokens) / len(tokens)), rel=1e-5)
