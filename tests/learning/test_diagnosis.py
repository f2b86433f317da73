"""The diagnosis branch, its prompts, and reports that do not state what was read: searched for again, and completed."""

from types import SimpleNamespace

import pytest
import torch
from batches import greedy, noise, normal, rows, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.choice import Findings, FindingsChoice
from fedtar_flare.learning.comparison import NONE, RESOLVED, UNCERTAIN, UNCHANGED
from fedtar_flare.learning.diagnosis import AttentionHead, DiagnosisBranch, extend
from fedtar_flare.learning.labels import NEGATIVE, PRESENT, labeler
from fedtar_flare.methods.fedmrg.config import PROMPTS
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.weights import fingerprint
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS

MODEL = preset("tiny", max_length=20)
KINDS = {**PROMPTS, "levels": {"prompt_classes": "levels", "prompt_place": "memory"}}


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


@pytest.mark.parametrize("place", ["last", "memory"])
def test_what_is_written_follows_from_the_predicted_prompts(place):
    model = extended(prompt_place=place)
    with torch.no_grad():
        model.diagnosis.embeddings.normal_(0, 3, generator=torch.Generator().manual_seed(3))
        seen = model.encoded(batch())
        prompts, classes = model.prompts(seen), model.diagnosis(seen.tokens, seen.slice_mask).argmax(-1)
    own = model.diagnosis.embeddings
    by_hand = own[classes] if place == "last" else torch.stack([own[d, classes[:, d]] for d in range(14)], dim=1)
    assert torch.equal(prompts, by_hand)
    written = model.generate(batch(), num_beams=1)
    assert [whole(model, row) for row in written] == greedy(model, batch(), written.shape[1])
    assert (model.generate(batch(), num_beams=2)[:, 0] == model.bos_id).all()


BEAMS = 5
decode = build_tokenizer(MODEL).decode
READERS = {name: labeler(name) for name in ("synthetic", "chexpert-rules", "ctrate-rules")}
SENTENCES = (
    "{degree} {a}.", "No {a}.", "No {a} or {b}.", "Possible {a}.", "{degree} {a} and {b}.", "The {a} has increased.",
    "{a} has resolved, {b} is unchanged.", "New {a} and {degree} {b}; no {c}.", "{a}, {degree}.", "Intact bones.",
)  # fmt: skip


def words(name):
    *others, last = name.lower().split("_")
    return " ".join([last, *others] if last in ("left", "right") else [*others, last])


def choice_of(reader, completes=True):
    return FindingsChoice(SimpleNamespace(reader=reader), 1, completes)


@st.composite
def texts(draw, reader):
    """A report of a few sentences on findings of a labeler; the last may be without a stop."""
    names = st.sampled_from(reader.findings).map(words)
    degrees = st.sampled_from(("small", "moderate", "large", ""))
    parts = draw(st.lists(st.tuples(st.sampled_from(SENTENCES), names, names, names, degrees), max_size=5))
    text = " ".join(s.format(a=a, b=b, c=c, degree=degree).strip().capitalize() for s, a, b, c, degree in parts)
    return text.rstrip("." * draw(st.booleans()))


def consistent(level, change):
    """A change that a level allows; none of any where there is no visit before."""
    return (UNCERTAIN if change == RESOLVED else change) if level else RESOLVED * (change == RESOLVED)


@st.composite
def cases(draw):
    """A labeler, a report, and what was read: mostly that a finding is absent."""
    reader = READERS[draw(st.sampled_from(sorted(READERS)))]
    names = st.sampled_from([name for name in reader.findings if name != reader.no_finding])
    some = draw(st.dictionaries(names, st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4))
    pairs = [some.get(name, (0, NONE)) for name in reader.findings]
    read = Findings(tuple(level for level, _ in pairs), tuple(consistent(*pair) for pair in pairs))
    return reader, draw(texts(reader)), read


def agrees(level, change, wanted_level, wanted_change):
    vague = PRESENT in (level, wanted_level) and 0 not in (level, wanted_level)
    claims = {NONE if one in (UNCHANGED, UNCERTAIN) else one for one in (change, wanted_change)}
    compared = change != UNCHANGED or wanted_change != NONE
    return (vague or level == wanted_level) and compared and len(claims) == 1


@settings(max_examples=50)
@given(cases())
def test_completing_changes_nothing_but_the_findings_that_were_read_otherwise(case):
    """Levels, changes, denials and doubts of all others stay; that the other side is denied may be left out.

    Of a finding that only the text states its change is left out.
    """
    reader, text, read = case
    choice = choice_of(reader)
    completed = choice.complete(text, read)
    before, after = choice.stated(text), choice.stated(completed)
    rows = zip(reader.findings, *read, *before, *after, reader.label(text), reader.label(completed), strict=True)
    for name, level, change, was, became, now, becomes, label, new in rows:
        if name == reader.no_finding:
            continue
        if (was, became, label) != (now, becomes, new):
            sided = name.endswith(("left", "right")) and (label, new) == (NEGATIVE, 0)
            wanted = level or was * (change != RESOLVED)
            assert sided or agrees(now, becomes, wanted, change), (text, completed)
            assert sided or not agrees(was, became, wanted, change)
    assert choice.count_differences(completed, read) <= choice.count_differences(text, read)
    assert choice_of(reader, completes=False).complete(text, read) == text


def test_no_change_is_claimed_without_a_visit_before():
    nothing = Findings((0,) * 14, (NONE,) * 14)
    expected = {"synthetic": "No left effusion. Cardiomegaly.", "chexpert-rules": "Cardiomegaly. No pleural effusion."}
    for name, text in expected.items():
        drafted = "The left effusion has resolved. Stable cardiomegaly."
        assert choice_of(READERS[name]).complete(drafted, nothing) == text


class Wanted:
    """A choice by the length of the text, in characters."""

    candidates = BEAMS

    def __init__(self, *lengths):
        self.lengths, self.seen = lengths, []

    def prompted_findings(self, seen):
        return self.lengths

    def complete(self, text, wanted):
        return text

    def count_differences(self, text, wanted):
        self.seen.append(text)
        return abs(len(text) - wanted)


def texts_of(model, b, choice=None, **options):
    model.choice = choice
    return [decode(row) for row in model.generate(b, **options).tolist()]


@pytest.fixture(scope="module")
def model():
    return extended("levels")


@pytest.fixture
def plain(model):
    return texts_of(model, batch())


def test_a_report_that_states_its_findings_is_not_searched_for_again(model, plain):
    assert extended("levels").choice is None
    assert extended("levels", candidates=BEAMS).choice.candidates == BEAMS
    choice = Wanted(*map(len, plain))
    assert texts_of(model, batch(), choice) == plain == choice.seen


def test_of_a_second_search_the_beam_that_agrees_best_is_taken_whatever_else_is_in_the_batch(model, plain):
    b, choice = batch(), Wanted(-1, -1)
    texts_of(model, b, choice)
    first, second = choice.seen[2 : 2 + BEAMS], choice.seen[2 + BEAMS :]
    assert len(second) == BEAMS and len(set(first)) == BEAMS
    assert [first[0], second[0]] == texts_of(model, b, num_beams=BEAMS), "the likeliest first"
    lengths = [len(first[3]), len(second[1])]
    best = [min(row, key=lambda text, n=n: abs(len(text) - n)) for row, n in zip((first, second), lengths, strict=True)]
    assert best != plain, "otherwise nothing is shown"
    assert texts_of(model, b, Wanted(*lengths)) == best
    assert [texts_of(model, rows(b, i), Wanted(lengths[i]))[0] for i in range(2)] == best
    assert texts_of(model, b, Wanted(len(plain[0]), lengths[1])) == [plain[0], best[1]], "one is searched for again"
    no_better = Wanted(0, 0)
    no_better.count_differences = lambda text, wanted: 1
    assert texts_of(model, b, no_better) == plain


class Longer(Wanted):
    """Adds as many words to a text as it is given."""

    candidates = 1

    def complete(self, text, wanted):
        return text + " nodule" * wanted


def test_a_completed_report_is_written_if_it_fits_in_the_length(model, plain, monkeypatch):
    b, short = batch(), 8
    first, second = texts_of(model, b, max_length=short)
    assert texts_of(model, b, Longer(0, 500)) == plain
    model.choice = Longer(1, 0)
    ids = model.generate(b, max_length=short)
    assert ids.shape[1] <= short and decode(ids[0].tolist()) in (first, first + " nodule")
    assert decode(ids[1].tolist()) == second
    ends = torch.tensor([[model.bos_id, 40, 41, model.eos_id, model.pad_id]] * 2)
    monkeypatch.setattr(model, "_search", lambda *given: lambda *asked: ends[:, None])
    first, second = texts_of(model, b)
    assert texts_of(model, b, Longer(3, 0)) == [first + " nodule nodule nodule", second]
