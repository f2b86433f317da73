"""What holds of every family of vision-language models: causal losses, marks that stay text, ends, and refusals."""

from itertools import chain

import pytest
import torch
from tables import cases
from tiny_vlms import FAMILIES, MORE_FAMILIES, REPORTS, batch, vlm_config
from torch.nn import functional as F

from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.vlm import marks_of

ENDS, OTHERS = cases(__file__, "marks.yaml").values()
TEXT = f"Effusion {' x'.join(chain(*ENDS.values(), OTHERS))}<<s></s>."
QUICK = [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES]


@pytest.fixture(scope="module", params=QUICK)
def vlm(request, tmp_path_factory):
    """A family's name, configuration, model and tokenizer."""
    config = vlm_config(MORE_FAMILIES[request.param](tmp_path_factory.mktemp(request.param)))
    return request.param, config, build_model(config), build_tokenizer(config)


def written_loss(model, tokenizer, i):
    """Loss of a report whose words the model is made to write, one after the other, by its own generation."""
    turns, images = model._conversation(batch(), i)
    asked = model._processor.apply_chat_template(turns, add_generation_prompt=True)
    plain = not asked.startswith(model._processor.tokenizer.bos_token or asked[:1])
    inputs = model._processor(text=[asked], images=[images], return_tensors="pt", add_special_tokens=plain)
    words, length = tokenizer.encode(REPORTS[i])[1:], inputs["input_ids"].shape[1]
    out = model.decoder.generate(
        **inputs, max_new_tokens=len(words), do_sample=False, eos_token_id=None, output_logits=True,
        return_dict_in_generate=True, prefix_allowed_tokens_fn=lambda _, ids: [words[len(ids) - length]],
    )  # fmt: skip
    return F.cross_entropy(torch.cat(out.logits), torch.tensor(words))


def test_a_report_s_loss_is_that_of_writing_it_whatever_the_batch(vlm):
    *_, model, tokenizer = vlm
    with torch.no_grad():
        losses = model(batch(), *tokenizer.batch(REPORTS))
        reference = torch.stack([written_loss(model, tokenizer, i) for i in range(3)])
        alone = torch.cat([model(batch(i), *tokenizer.batch([REPORTS[i]])) for i in range(3)])
    torch.testing.assert_close(losses, reference)
    torch.testing.assert_close(alone, losses)


def test_what_is_written_has_the_likelihood_that_its_loss_says_and_not_that_of_the_batch(vlm):
    """Also of several images, which beams must keep apart."""
    *_, model, tokenizer = vlm
    written = model.generate(batch(), num_beams=3, max_length=12).tolist()
    alone = [model.generate(batch(i), 3, 12)[0].tolist() for i in range(3)]
    assert list(map(tokenizer.decode, written)) == list(map(tokenizer.decode, alone))
    result = model.decoder.generate(
        **model.inputs(batch()), num_beams=3, max_new_tokens=8, do_sample=False, eos_token_id=None,
        suppress_tokens=model._processor.tokenizer.all_special_ids, pad_token_id=model.pad_id,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ids = F.pad(result.sequences[:, -8:], (1, 0))
    with torch.no_grad():
        torch.testing.assert_close(model(batch(), ids, ids), -result.sequences_scores, rtol=1e-4, atol=1e-4)


def test_marks_in_a_report_stay_text_in_training_and_in_the_turn_of_the_visit_before(vlm):
    _, config, model, _ = vlm
    long = build_tokenizer(config.replace(max_length=999))
    marks = {*marks_of(model._processor.tokenizer).values()}
    body = long.encode(TEXT)[1:-1]
    assert not marks & {*body} and long.decode([long.bos_id, *body, long.eos_id]) == TEXT
    plain, marked = (model.inputs(batch(0, prior=text))["input_ids"][0] for text in ("Effusion.", TEXT))
    assert [i for i in marked.tolist() if i in marks] == [i for i in plain.tolist() if i in marks]
    again = model._processor.tokenizer.decode(marked, skip_special_tokens=False).replace(" ", "")
    assert TEXT.replace(" ", "") in again, "the text is all there"


def test_a_draft_ends_at_each_end_that_the_model_names_and_has_no_other_mark(vlm):
    family, _, model, tokenizer = vlm
    marks = marks_of(model._processor.tokenizer)
    assert tokenizer.end_ids == {marks[end] for end in ENDS[family]} and tokenizer.eos_id == marks[ENDS[family][0]]
    wanted = []

    def likeliest(module, inputs, output):
        output.logits[..., wanted] += 1e4
        return output

    handle = model.decoder.register_forward_hook(likeliest)
    for end in ENDS[family]:
        wanted[:] = [marks[end]]
        assert tokenizer.decode(model.generate(batch(1), 2, 12)[0].tolist()) == ""
    wanted[:] = {*marks.values()} - tokenizer.end_ids & {*range(model.decoder.get_output_embeddings().out_features)}
    assert not {*wanted} & {*model.generate(batch(1), 2, 12)[0, 1:-1].tolist()} - {tokenizer.pad_id}
    handle.remove()
