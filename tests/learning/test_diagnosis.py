"""The diagnosis branch, the labels that it learns from, and prompts before the begin token."""

import pytest
import torch
from batches import greedy, noise, whole

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.diagnosis import NOISE, AttentionHead, DiagnosisBranch, diagnosis_losses, extend
from fedtar_flare.learning.labels import labeler
from fedtar_flare.methods.fedmrg.config import PROMPTS
from fedtar_flare.models import learned_prompts
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import preset
from fedtar_flare.models.weights import fingerprint
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS
from fedtar_flare.testing import executor_of

MODEL = preset("tiny", max_length=20)


KINDS = {**PROMPTS, "levels": {"prompt_classes": "levels", "prompt_place": "memory"}}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch():
    return noise(2, there=(4, 2))


def extended(prompts="paper", **settings):
    """A model with FedMRG's branch, or with the one that compares two visits."""
    model = build_model(MODEL)
    settings = {"labeler": "synthetic", "slices": MODEL.slices, "seed": 0, "head_weights": None} | settings
    extend(model, {"candidates": 1, "complete": False, "certain": 0.5, **KINDS[prompts], **settings})
    return model


def test_without_a_labeler_the_model_is_the_plain_one_and_a_branch_is_no_part_of_the_fingerprint():
    plain, none, branched = build_model(MODEL), extended(labeler="none"), extended()
    ids = torch.randint(3, 300, (2, 6), generator=torch.Generator().manual_seed(2))
    assert none.diagnosis is None and labeler("none").label("effusion") == ()
    with torch.no_grad():
        assert torch.equal(plain(batch(), ids, ids), none(batch(), ids, ids))
        memory, mask = plain.memory(batch(), plain.encoded(batch()))
        empty = plain.decode(memory, mask, ids, torch.zeros(2, 0, 32))[0]
        assert torch.equal(empty, plain.decode(memory, mask, ids)[0])
    branched.diagnosis = None
    assert fingerprint(branched) == fingerprint(plain)


def test_the_head_reads_mean_and_largest_of_the_slices_that_are_there():
    branch = DiagnosisBranch(3, 4, 5, slices=4, words=torch.zeros(2, 7), seed=0)
    tokens, mask = normal(2, 4, 6, 5), batch().slice_mask
    logits = branch(tokens, mask)
    for b, slices in ((0, 4), (1, 2)):
        means = tokens[b, :slices].mean(1)
        features = torch.cat([means.mean(0), means.max(0).values])
        by_hand = (branch.head.weight @ features + branch.head.bias).view(3, 4)
        torch.testing.assert_close(logits[b], by_hand, rtol=1e-5, atol=1e-6)
    one_slice = DiagnosisBranch(3, 4, 5, slices=1, words=torch.zeros(2, 7), seed=0)
    assert one_slice.head.weight.shape == (12, 5)


def test_a_query_for_each_finding_reads_where_it_looks():
    head = AttentionHead(3, 2, 5, torch.Generator().manual_seed(0))
    tokens, mask = normal(2, 4, 6, 5), batch().slice_mask
    assert not head(tokens, mask).any(), "nothing is known at first"
    with torch.no_grad():
        head.weight.copy_(normal(3, 2, 5, seed=1))
        head.bias.copy_(normal(3, 2, seed=2))
        logits = head(tokens, mask)
    for b, there in ((0, 4), (1, 2)):
        x = tokens[b, :there].reshape(-1, 5)
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        for d in range(3):
            weights = torch.softmax(x @ head.queries[d] / 5**0.5, 0)
            by_hand = head.weight[d] @ (weights @ x) + head.bias[d]
            torch.testing.assert_close(logits[b, d], by_hand, rtol=1e-4, atol=1e-5)


def test_the_paper_s_branch_begins_as_it_always_did():
    """A linear head drawn like torch's, and embeddings around the mean word, from the job's seed alone."""
    model, draw = extended(), torch.Generator().manual_seed(0)
    words, branch = model.decoder.get_input_embeddings().weight, model.diagnosis
    weight = (torch.rand(14 * 4, 2 * model.channels, generator=draw) * 2 - 1) / (2 * model.channels) ** 0.5
    assert torch.equal(branch.head.weight, weight) and not branch.head.bias.any()
    torch.testing.assert_close(branch.embeddings, words.mean(0) + NOISE * torch.randn(4, 32, generator=draw))
    assert branch.position == "last" and model.choice is None


def test_the_shipped_heads_are_of_the_known_findings_and_fit_no_other_shape():
    """Rows of the new findings are zero, and claim none, until a hospital teaches them."""
    known = torch.tensor([name in KNOWN_FINDINGS for name in FINDINGS])
    for prompts in ("memory", "levels"):
        model = build_model(preset("small"))
        settings = {"labeler": "synthetic", "slices": 16, "seed": 0, "head_weights": "small", "certain": 0.5}
        extend(model, {**settings, "candidates": 1, "complete": False, **KINDS[prompts]})
        head, embeddings = model.diagnosis.head, model.diagnosis.embeddings
        assert head.weight[known].flatten(1).any(1).all() and embeddings[known, 1:].flatten(1).any(1).all()
        assert not head.weight[~known].any() and not (head.bias[~known] > 0).any()
        for wrong in ({"prompt_place": "last"}, {"prompt_classes": "all"}) if prompts == "memory" else ():
            with pytest.raises(ConfigError, match="head_weights"):
                extend(build_model(preset("small")), settings | KINDS[prompts] | wrong)
        with pytest.raises(ConfigError, match="head_weights"):
            extended(prompts, head_weights="small")


@pytest.mark.parametrize("place", ["last", "memory"])
def test_prompts_stand_before_the_begin_token_at_the_last_positions_or_in_the_memory_and_bear_no_loss(place):
    model = extended(prompt_place=place, prompt_classes="positive")
    ids = torch.randint(3, 300, (2, 5), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model.diagnosis.embeddings.normal_(generator=torch.Generator().manual_seed(3))
        seen = model.encoded(batch())
        (memory, mask), prompts = model.memory(batch(), seen), model.prompts(seen)
        logits, states = model.decode(memory, mask, ids, prompts)
        given = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "output_hidden_states": True}
        if place == "last":
            given |= {
                "inputs_embeds": torch.cat([prompts, model.decoder.transformer.wte(ids)], dim=1),
                "position_ids": torch.cat([torch.arange(82, 96), torch.arange(5)]).expand(2, -1),
                "attention_mask": torch.ones(2, 19),
            }
        else:
            given |= {"input_ids": ids, "encoder_hidden_states": torch.cat([memory, prompts], dim=1)}
            given["encoder_attention_mask"] = torch.cat([mask, mask.new_ones(2, 14)], dim=1)
        by_hand, others = model.decoder(**given), model.decode(memory, mask, ids, prompts + 1)[0]
    assert prompts.shape == (2, 14, MODEL.decoder_config["n_embd"]) and not mask.all()
    torch.testing.assert_close(logits, by_hand.logits[:, -5:])
    torch.testing.assert_close(states, by_hand.hidden_states[-1][:, -5:])
    assert not torch.allclose(others, logits), "the words attend to the prompts"


@pytest.mark.parametrize("beams", [1, 2])
def test_untrained_prompts_beside_the_begin_token_change_nothing(beams):
    """As D further begin tokens at its position that share its weight."""
    plain, model = build_model(MODEL), build_model(MODEL)
    learned_prompts.extend(model, 14, False, seed=0)
    with torch.no_grad():
        model.diagnosis.embeddings.copy_(model.decoder.get_input_embeddings().weight[model.bos_id].expand(14, -1))
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = plain.bos_id
    with torch.no_grad():
        memory, mask = plain.memory(batch(), plain.encoded(batch()))
        prompts = model.prompts(model.encoded(batch()))
        assert prompts.shape == (2, 14, MODEL.decoder_config["n_embd"])
        beside = model.decode(memory, mask, ids, prompts)
        torch.testing.assert_close(beside, plain.decode(memory, mask, ids), rtol=1e-4, atol=1e-5)
        prompts = prompts.clone()
        prompts[1, 3] = normal(MODEL.decoder_config["n_embd"], seed=4)
        other = model.decode(memory, mask, ids, prompts)[0]
    torch.testing.assert_close(other[0], beside[0][0])
    assert not torch.allclose(other[1, 0], beside[0][1, 0], atol=1e-3)
    assert torch.equal(plain.generate(batch(), num_beams=beams), model.generate(batch(), num_beams=beams))


@pytest.mark.parametrize("place", ["last", "memory"])
@pytest.mark.parametrize("beams", [1, 2])
def test_what_is_written_follows_from_the_predicted_prompts(beams, place):
    model = extended(prompt_place=place)
    with torch.no_grad():
        model.diagnosis.embeddings.normal_(0, 3, generator=torch.Generator().manual_seed(3))
        seen = model.encoded(batch())
        prompts, classes = model.prompts(seen), model.diagnosis(seen.tokens, seen.slice_mask).argmax(-1)
    own = model.diagnosis.embeddings
    by_hand = own[classes] if place == "last" else torch.stack([own[d, classes[:, d]] for d in range(14)], dim=1)
    assert torch.equal(prompts, by_hand)
    written = model.generate(batch(), num_beams=beams)
    assert written.shape[1] <= MODEL.max_length and (written[:, 0] == model.bos_id).all()
    if beams == 1:
        assert [whole(model, row) for row in written] == greedy(model, batch(), written.shape[1])


def test_the_loss_is_the_mean_of_the_findings_cross_entropies():
    logits, classes = normal(2, 3, 4), torch.tensor([[0, 1, 3], [2, 2, 0]])
    expected = -logits.log_softmax(2).gather(2, classes[..., None])[..., 0].mean(1)
    torch.testing.assert_close(diagnosis_losses(logits, classes), expected)


def test_prompts_and_reports_that_are_too_long_for_the_decoder_are_refused_when_built():
    with pytest.raises(ConfigError, match=r"14 diagnosis prompts.*96 tokens.*96 positions: set model.max_length to 82"):
        executor_of("fedmrg", preset="tiny")
    for fits in ({"labeler": "none"}, {"prompts": "memory"}):
        assert executor_of("fedmrg", preset="tiny", fedmrg=fits).strategy.settings.model.max_length == 96
    with pytest.raises(ConfigError, match="96 positions"):
        extend(build_model(preset("tiny")), {"labeler": "synthetic", "slices": 4, "seed": 0, **PROMPTS["paper"]})
