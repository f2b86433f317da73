"""Reporting styles 1 to 3: before and after the planted change."""

from __future__ import annotations

from fedtar_flare.synthetic.reports import BONES, SHORT_NAMES, Wording, per_kind

STYLE_1 = (
    Wording(  # full sentences, lungs first
        opening=("CT of the chest.", "CT of the chest, compared with prior."),
        sections=(
            (("consolidation", "nodule", "emphysema"), "The lungs are clear."),
            (("effusion",), "There is no pleural effusion."),
            (("cardiomegaly",), "The heart size is normal."),
            (("lymphadenopathy",), "There is no lymphadenopathy."),
            ((BONES,), ""),
        ),
        found=per_kind(
            "There is a {size} {side} pleural effusion{change}.",
            "There is {size} {side} lower lobe consolidation{change}.",
            "There is a {size} {side} upper lobe nodule{change}.",
            "There is {size} emphysema{change}.",
            "The heart is {size} enlarged{change}.",
            "There is {size} mediastinal lymphadenopathy{change}.",
        ),
        sizes=per_kind(
            "small|moderate|large",
            "minor|moderate|extensive",
            "small|moderate|large",
            "mild|moderate|severe",
            "mildly|moderately|severely",
            "mild|moderate|severe",
        ),
        changes=", new|, increased|, decreased",
        names=SHORT_NAMES,
        resolved="Interval resolution of {names}.",
        bones=("There is no acute bone abnormality.", "The spine shows degenerative changes."),
    ),
    Wording(  # by organ, bones first
        opening=("Structured chest report.", "Structured chest report, follow-up."),
        sections=(
            ((BONES,), ""),
            (("cardiomegaly",), "Heart: normal dimensions."),
            (("lymphadenopathy",), "Mediastinum: unremarkable."),
            (("effusion",), "Pleura: dry on both sides."),
            (("nodule", "consolidation", "emphysema"), "Parenchyma: well aerated throughout."),
        ),
        found=per_kind(
            "Pleura: {side} effusion of {size} volume{change}.",
            "Parenchyma: {size} {side} basal consolidation{change}.",
            "Parenchyma: {size} {side} apical nodule{change}.",
            "Parenchyma: {size} grade emphysema{change}.",
            "Heart: {size} grade cardiomegaly{change}.",
            "Mediastinum: {size} grade lymphadenopathy{change}.",
        ),
        sizes=per_kind("low|medium|high", "limited|medium|extensive", "tiny|medium|big", *["low|medium|high"] * 3),
        changes=" (new)| (worse)| (better)",
        names=SHORT_NAMES,
        resolved="Resolved: {names}.",
        bones=("Bones: intact, normal density.", "Bones: intact, reduced density."),
    ),
)

STYLE_2 = (
    Wording(  # one item per kind
        opening=("CT THORAX.", "CT THORAX CONTROL."),
        sections=(
            (("effusion",), "EFFUSION: none."),
            (("consolidation",), "CONSOLIDATION: none."),
            (("nodule",), "NODULE: none."),
            (("emphysema",), "EMPHYSEMA: none."),
            (("cardiomegaly",), "HEART SIZE: normal."),
            (("lymphadenopathy",), "LYMPH NODES: normal."),
            ((BONES,), ""),
        ),
        found=per_kind(
            "EFFUSION: {side} side, {size}{change}.",
            "CONSOLIDATION: {side} lower lobe, {size}{change}.",
            "NODULE: {side} upper lobe, {size}{change}.",
            "EMPHYSEMA: {size}{change}.",
            "HEART SIZE: {size} enlarged{change}.",
            "LYMPH NODES: {size} enlarged{change}.",
        ),
        sizes=per_kind(
            "minimal|medium|massive",
            "minimal|medium|massive",
            "16 mm|24 mm|35 mm",
            "grade 1|grade 2|grade 3",
            "slightly|clearly|massively",
            "slightly|clearly|massively",
        ),
        changes=", NEW|, UP|, DOWN",
        names=SHORT_NAMES,
        resolved="RESOLVED: {names}.",
        bones=("BONES: normal mineral content.", "BONES: osteopenia with spondylosis."),
    ),
    Wording(  # in the first person, heart first
        opening=("Thoracic CT was reviewed.", "Thoracic CT was reviewed again."),
        sections=(
            (("cardiomegaly",), "We see a normal cardiac silhouette."),
            (("lymphadenopathy",), "We see normal lymph nodes."),
            (("emphysema", "nodule", "consolidation"), "We see healthy lung tissue."),
            (("effusion",), "We see dry pleural cavities."),
            ((BONES,), ""),
        ),
        found=per_kind(
            "We see {size} pleural fluid on the {side}{change}.",
            "We see {size} {side} basal airspace disease{change}.",
            "We see {size} {side} apical nodular shadowing{change}.",
            "We see {size} emphysematous change{change}.",
            "We see {size} cardiac enlargement{change}.",
            "We see {size} mediastinal adenopathy{change}.",
        ),
        sizes=per_kind(*["slight|evident|gross"] * 6),
        changes=", recent|, progressing|, regressing",
        names=SHORT_NAMES,
        resolved="We no longer see {names}.",
        bones=("We see sound bones.", "We see worn vertebrae."),
    ),
)

STYLE_3 = (
    Wording(  # impression first, then detail in telegraphic style
        opening=("Summary of thoracic imaging.", "Summary of repeat thoracic imaging."),
        impression_first=True,
        impression=("Impression: {names}.", "Impression: normal thorax."),
        sections=(
            (("nodule", "consolidation", "emphysema"), "Lungs well expanded."),
            (("lymphadenopathy",), "Hila and mediastinum slender."),
            (("cardiomegaly",), "Cardiothoracic ratio normal."),
            (("effusion",), "Costophrenic recesses sharp."),
            ((BONES,), ""),
        ),
        found=per_kind(
            "{side} pleural effusion amount {size}{change}.",
            "{side} basal infiltrate extent {size}{change}.",
            "{side} apical nodule diameter {size}{change}.",
            "Emphysema extent {size}{change}.",
            "Enlarged heart, ratio {size}{change}.",
            "Enlarged mediastinal nodes, number {size}{change}.",
        ),
        sizes=per_kind(
            "one third|half|two thirds",
            "one segment|several segments|whole lobe",
            "16 mm|24 mm|35 mm",
            "ten percent|thirty percent|sixty percent",
            "borderline|raised|very high",
            "few|several|many",
        ),
        changes=" appearing| growing| shrinking",
        names=SHORT_NAMES,
        resolved="Cleared: {names}.",
        bones=("Thoracic cage regular.", "Thoracic cage with vertebral wedging."),
    ),
    Wording(  # the finding as subject, one word of judgement last
        opening=("Thoracic imaging today.", "Further thoracic imaging today."),
        sections=(
            ((BONES,), ""),
            (("effusion",), "Pleural surfaces look smooth."),
            (("lymphadenopathy", "cardiomegaly"), "Heart and great vessels look ordinary."),
            (("emphysema", "consolidation", "nodule"), "Lung texture looks ordinary."),
        ),
        found=per_kind(
            "{size} effusion surrounds the {side} lung{change}.",
            "{size} consolidation occupies the {side} lung{change}.",
            "{size} nodule projects over the {side} lung{change}.",
            "{size} emphysema affects all lobes{change}.",
            "{size} cardiomegaly displaces the lungs{change}.",
            "{size} lymphadenopathy widens the mediastinum{change}.",
        ),
        sizes=per_kind(*["modest|appreciable|pronounced"] * 6),
        changes=" since recently| with advance| with retreat",
        names=SHORT_NAMES,
        resolved="Disappeared: {names}.",
        bones=("Bone density is preserved.", "Bone density is reduced."),
        impression=("Overall abnormal.", "Overall normal."),
    ),
)
