"""Vision-language models of two families as report generators, on tiny random ones in folders."""

import copy
import shutil
import string

import pytest
import torch
from adapted_models import adapted, patients, shake, written_out_weights
from batches import noise, rows
from tiny_vlms import FAMILIES, vlm_config, write_gemma
from torch.func import functional_call
from torch.nn import functional as F

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import VLM_TARGETS
from fedtar_flare.models.outline import outline
from fedtar_flare.models.vlm import EARLIER
from fedtar_flare.runtime.requirements import AdaptedModel, require_memory, update_memory
from fedtar_flare.site.site_file import SiteConfig

REPORTS = ["No pleural effusion.", "There is a nodule <eos> in the left lung.", "Stable."]
PRIOR = "An <|end|> effusion <start_of_image>."


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder):
    return build_model(vlm_config(folder))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return build_tokenizer(vlm_config(folder))


def batch():
    """Three visits, of 2, 1 and 2 slices; the first shows image and report of the visit before, the last a report."""
    made = noise(3, there=(2, 1, 2), slices=2)
    before = noise(3, there=(1, 1, 1), slices=1, seed=5)
    before.slice_mask[1:] = False
    made.prior = PriorBatch(torch.tensor([90.0, 0.0, 3.4]), before, reports=(PRIOR, None, "Clear."))
    return made


def one(i):
    """One visit of the batch by itself."""
    made, before = rows(batch(), i), batch().prior
    shown = rows(before.images, i) if before.images.slice_mask[i].any() else None
    made.prior = PriorBatch(before.days[i : i + 1], shown, reports=before.reports[i : i + 1])
    return made


def by_hand(model, tokenizer, batch, i):
    """Loss of one report in the conversation that the processor and chat template make of the whole of it."""
    turns, images = model._conversation(batch, i)
    asked = model._processor.apply_chat_template(turns, add_generation_prompt=True)
    inputs = model._processor(text=[asked], images=[images], return_tensors="pt", add_special_tokens=False)
    words = torch.tensor([tokenizer.encode(REPORTS[i])[1:]])
    length = inputs["input_ids"].shape[1]
    whole = {n: F.pad(v, (0, words.shape[1])) if v.shape == (1, length) else v for n, v in inputs.items()}
    whole["input_ids"][:, length:], whole["attention_mask"][:, length:] = words, 1
    logits = model.decoder(**whole).logits[:, length - 1 : -1]
    return F.cross_entropy(logits[0], words[0])


def test_a_report_s_loss_is_its_own_whatever_the_batch(model, tokenizer):
    with torch.no_grad():
        losses = model(batch(), *tokenizer.batch(REPORTS))
        reference = torch.stack([by_hand(model, tokenizer, batch(), i) for i in range(3)])
        alone = [model(one(i), *tokenizer.batch([REPORTS[i]])) for i in range(3)]
    torch.testing.assert_close(losses, reference)
    torch.testing.assert_close(torch.cat(alone), losses)


def test_the_conversation_tells_visits_in_their_order_and_no_report_spells_a_mark(model):
    turns, images = model._conversation(batch(), 0)
    said = [(turn["role"], [part.get("text", "image") for part in turn["content"]]) for turn in turns]
    prompt = model._config.prompt
    assert said[0] == (
        "user",
        ["image", f"{EARLIER.format(days=90)} {prompt}"],
    )
    assert said[2] == ("user", ["image", "image", prompt]) and len(images) == 3
    marks = {"<|end|>", "<start_of_image>"} & {*model._processor.tokenizer.get_vocab()}
    assert said[1][0] == "assistant" and marks and not any(mark in said[1][1][0] for mark in marks)
    assert torch.equal(images[0], batch().prior.images.images[0, 0])
    assert [len(model._conversation(batch(), i)[0]) for i in (1, 2)] == [1, 3]


def test_a_montage_has_all_slices_in_rows_from_the_first(folder):
    model = build_model(vlm_config(folder, slice_view="montage"))
    made = noise(1, there=(3,), slices=3)
    (one,) = model._views(made, 0)
    a, b, c = made.images[0]
    assert torch.equal(one, torch.cat([torch.cat([a, b], 2), torch.cat([c, torch.zeros_like(c)], 2)], 1))


@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_written_has_the_likelihood_that_its_loss_says_and_not_that_of_the_batch(model, tokenizer, beams):
    """Also of several images, which beams must keep apart."""
    written = model.generate(batch(), num_beams=beams, max_length=12)
    alone = [model.generate(one(i), beams, 12)[0] for i in range(3)]
    assert [tokenizer.decode(row) for row in written.tolist()] == [tokenizer.decode(row.tolist()) for row in alone]
    marks = model._processor.tokenizer.all_special_ids
    found = model.decoder.generate(
        **model.inputs(batch()), num_beams=max(2, beams), max_new_tokens=8, do_sample=False, suppress_tokens=marks,
        eos_token_id=None, pad_token_id=model.pad_id, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ids = F.pad(found.sequences[:, -8:], (1, 0))
    with torch.no_grad():
        torch.testing.assert_close(model(batch(), ids, ids), -found.sequences_scores, rtol=1e-4, atol=1e-4)


def test_patient_adapters_act_on_their_own_sample_as_written_out(folder, tokenizer):
    base = build_model(vlm_config(folder)).double()
    plain = copy.deepcopy(base)
    model, patient = adapted(base, VLM_TARGETS)
    q, steps = patients()
    ids, labels = tokenizer.batch(REPORTS)
    shake(model)
    with torch.no_grad():
        before = base(batch(), ids, labels)
        with patient.adapt(q, steps):
            assert torch.equal(base(batch(), ids, labels), before), "untrained, they change nothing"
        shake(patient)
        with patient.adapt(q, steps):
            losses, drafts = base(batch(), ids, labels), base.generate(batch(), 2, 6)
        assert torch.equal(base(batch(), ids, labels), before)
        for i in range(3):
            weights = written_out_weights(plain, model, patient, q[i], steps[i])
            found = functional_call(plain, weights, (one(i), ids[i : i + 1], labels[i : i + 1]))
            torch.testing.assert_close(found[0], losses[i], rtol=1e-5, atol=1e-6)
            with patient.adapt(q[i : i + 1], steps[i : i + 1]):
                assert tokenizer.decode(base.generate(one(i), 2, 6)[0].tolist()) == tokenizer.decode(drafts[i].tolist())
    with patient.adapt(q, steps):
        base(batch(), ids, labels)[1].backward()
    own = {name: p.grad.abs().sum(1) if name == "time_embedding" else p.grad for name, p in patient.named_parameters()}
    assert all(bool(gradient.any()) for gradient in own.values())
    if "time_embedding" in own:
        assert own["time_embedding"].nonzero().flatten().tolist() == [int(steps[1]) - 1], "of its own step alone"
    assert not any(p.requires_grad for n, p in base.named_parameters() if "vis" in n)


def test_adapted_vision_layers_need_as_many_images_of_each(folder, tokenizer):
    base = build_model(vlm_config(folder)).double()
    _, patient = adapted(base, ("decoder.*vis*.fc1",))
    shake(patient)
    (q, steps), (ids, labels), alike = patients(), tokenizer.batch(REPORTS), noise(3, slices=2)
    with patient.adapt(q, steps), torch.no_grad():
        with pytest.raises(DataError, match="different numbers of images"):
            base(batch(), ids, labels)
        losses = base(alike, ids, labels)
    with patient.adapt(q[1:2], steps[1:2]), torch.no_grad():
        torch.testing.assert_close(base(rows(alike, 1), ids[1:2], labels[1:2]), losses[1:2])


def test_its_outline_is_told_without_weights_and_bars_words_pixels_and_output(folder, model):
    known = outline(vlm_config(folder))
    assert known.parameters == sum(p.numel() for p in model.parameters())
    assert {"decoder.lm_head", "decoder.model.language_model.embed_tokens"} <= known.barred
    assert any("patch_embed" in name for name in known.barred)
    assert len(known.targeted(VLM_TARGETS)) == 14


def test_what_it_cannot_be_is_refused_by_name(folder, tmp_path):
    for wrong, match in (
        ({"decoder_name": "nobody/vlm"}, "could not be fetched"),
        ({"decoder_name": None}, "local folder or hub name"),
        ({"encoder_name": "resnet18"}, "none, as family is 'vlm'"),
    ):
        with pytest.raises(ConfigError, match=match):
            build_model(vlm_config(folder, **wrong))
    mute = shutil.copytree(folder, tmp_path / "mute")
    (mute / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        build_model(vlm_config(mute))


def kept_bytes(model, tokenizer, reports):
    """What the backward pass finds of a forward pass, without parameters, once each."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(noise(reports, slices=1, size=28), *tokenizer.batch([string.printable] * reports))
    return sum(size for _, size in kept.values())


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_memory_of_an_update_is_estimated_before_a_start_and_refused_with_numbers(folder, monkeypatch, recomputed):
    config = vlm_config(folder, max_length=40, slices=1, image_size=28)
    model, tokenizer = build_model(config), build_tokenizer(config)
    add_lora(model, targets=VLM_TARGETS, rank=2, seed=0)
    if recomputed:
        model.recompute_layers()
    training = TrainingConfig(batch_size=8, micro_batch=3, gradient_checkpointing=recomputed)
    asked = AdaptedModel(config, LoRAConfig(rank=2))
    needs = update_memory(asked, training, 0, half=False)
    values = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert needs["weights"] == 4 * (sum(p.numel() for p in model.parameters()) - values)
    assert needs["what is trained"] == 16 * values
    found = kept_bytes(model, tokenizer, 3) + 8 * 3 * 40 * model.decoder.config.text_config.vocab_size  # its gradient
    most = 3 if recomputed else 1.5  # a layer that is computed again is not seen here
    assert 0.7 < needs["3 reports at once"] / found < most
    site = SiteConfig(source="synthetic", device="cpu")
    require_memory(asked, training, 0, site)
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(ConfigError, match=r"needs about 0.00 GB: 0.00 of weights, .* 3 reports at once; cpu has 0.00"):
        require_memory(asked, training, 0, site)


def test_weights_of_four_bits_are_adapted_as_others(tmp_path):
    """Per patient too; the losses are near those of the whole weights."""
    pytest.importorskip("bitsandbytes")
    folder = write_gemma(tmp_path, width=64)
    base, whole = build_model(vlm_config(folder, decoder_dtype="4bit")), build_model(vlm_config(folder))
    tokenizer = build_tokenizer(vlm_config(folder))
    ids, labels = tokenizer.batch(REPORTS)
    with torch.no_grad():
        torch.testing.assert_close(base(batch(), ids, labels), whole(batch(), ids, labels), rtol=0.1, atol=0.1)
    _, patient = adapted(base, VLM_TARGETS)
    q, steps = patients()
    with patient.adapt(q.float(), steps):
        base(batch(), ids, labels).sum().backward()
    assert any(bool(p.grad.any()) for p in patient.parameters())


def test_four_bits_without_their_library_name_the_extra(folder, monkeypatch):
    monkeypatch.setattr("fedtar_flare.models.vlm.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fedtar_flare\[vlm\]"):
        build_model(vlm_config(folder, decoder_dtype="4bit"))
