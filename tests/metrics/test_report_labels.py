from fedtar_flare.metrics.report_labels import report_labels


def test_stated_labels_are_sure_and_doubted_ones_are_not():
    labels = report_labels("chexpert-rules")
    assert labels("Right pleural effusion. Possible pneumonia. No pneumothorax.") == (
        {"Pleural Effusion"},
        {"Pneumonia"},
    )
    assert labels("The lungs are clear. Normal heart size.") == (frozenset(), frozenset())
    assert labels("A pacemaker is in place. The lungs are clear.") == (frozenset(), frozenset())


def test_ct_reports_have_the_labels_of_ct():
    sure, unsure = report_labels("ctrate-rules")("Emphysema in both upper lobes. No pericardial effusion.")
    assert sure == {"Emphysema"} and not unsure
