"""Reporting styles 4 to 6: before and after the planted change."""

from __future__ import annotations

from fedtar_flare.synthetic.reports import BONES, SHORT_NAMES, Wording, per_kind

STYLE_4 = (
    Wording(  # formal, passive, mediastinum first
        opening=("Multislice scan.", "Repeat multislice scan."),
        sections=(
            (("lymphadenopathy",), "Mediastinal contours are preserved."),
            (("cardiomegaly",), "Cardiac chambers are of usual calibre."),
            (("effusion",), "Pleural cavities are empty."),
            (("emphysema", "consolidation", "nodule"), "Pulmonary parenchyma is preserved."),
            ((BONES,), ""),
        ),
        found=per_kind(
            "One notes {size} pleural fluid in the {side} hemithorax{change}.",
            "One notes {size} airspace opacity, {side} lower zone{change}.",
            "One notes {size} nodular density, {side} upper zone{change}.",
            "One notes {size} emphysematous destruction{change}.",
            "One notes {size} enlarged cardiac chambers{change}.",
            "One notes {size} enlarged mediastinal nodes{change}.",
        ),
        sizes=per_kind(
            "scanty|considerable|abundant",
            "patchy|segmental|lobar",
            "minute|sizeable|bulky",
            "discrete|considerable|advanced",
            "discretely|considerably|grossly",
            "discretely|considerably|grossly",
        ),
        changes=", new|, progressive|, regressive",
        names=SHORT_NAMES,
        resolved="Complete resolution of {names}.",
        bones=("Osseous structures are preserved.", "Osseous structures are demineralised."),
    ),
    Wording(  # scores
        opening=("Scored thoracic scan.", "Scored thoracic scan with interval."),
        sections=(
            (("consolidation",), "Airspace score 0."),
            (("nodule",), "Focal lesion score 0."),
            (("emphysema",), "Airway score 0."),
            (("effusion",), "Pleural score 0."),
            (("cardiomegaly",), "Cardiac score 0."),
            (("lymphadenopathy",), "Nodal score 0."),
            ((BONES,), ""),
        ),
        found=per_kind(
            "Pleural score {size}, effusion {side}{change}.",
            "Airspace score {size}, consolidation {side}{change}.",
            "Focal lesion score {size}, nodule {side}{change}.",
            "Airway score {size}, emphysema{change}.",
            "Cardiac score {size}, cardiomegaly{change}.",
            "Nodal score {size}, adenopathy{change}.",
        ),
        sizes=per_kind(*["1|2|3"] * 6),
        changes=", added| (plus)| (minus)",
        names=SHORT_NAMES,
        resolved="Gone: {names}.",
        bones=("Skeletal score 0.", "Skeletal score 1."),
    ),
)

STYLE_5 = (
    Wording(  # what is seen stands first, how much after it; impression last
        opening=("Report: chest CT.", "Report: chest CT with comparison."),
        sections=(
            ((BONES,), ""),
            (("cardiomegaly",), "Heart not enlarged."),
            (("consolidation", "nodule", "emphysema"), "Lungs without infiltrate, nodule or emphysema."),
            (("effusion", "lymphadenopathy"), "No fluid and no swollen nodes."),
        ),
        found=per_kind(
            "Effusion ({side}) measuring {size}{change}.",
            "Infiltrate ({side}) measuring {size}{change}.",
            "Nodule ({side}) measuring {size}{change}.",
            "Emphysema rated {size}{change}.",
            "Enlarged heart rated {size}{change}.",
            "Enlarged lymph nodes rated {size}{change}.",
        ),
        sizes=per_kind("25 mm|45 mm|75 mm", "4 cm|7 cm|10 cm", "16 mm|24 mm|35 mm", *["slight|marked|extreme"] * 3),
        changes=", newly present|, previously smaller|, previously larger",
        names=SHORT_NAMES,
        resolved="Not present any more: {names}.",
        bones=("Bones without fracture.", "Bones with wear but without fracture."),
        impression=("Conclusion: {names}.", "Conclusion: nothing pathological."),
    ),
    Wording(  # telling a colleague
        opening=("Dear colleague, thanks for the referral.", "Dear colleague, thanks for the renewed referral."),
        sections=(
            (("emphysema", "nodule", "consolidation"), "I find the lungs normal."),
            (("cardiomegaly", "lymphadenopathy"), "I find heart and mediastinum normal."),
            (("effusion",), "I find the pleura normal."),
            ((BONES,), ""),
        ),
        found=per_kind(
            "I note {size} effusion at the {side} base{change}.",
            "I note {size} consolidation at the {side} base{change}.",
            "I note {size} nodule at the {side} apex{change}.",
            "I note {size} emphysema{change}.",
            "I note {size} cardiomegaly{change}.",
            "I note {size} lymphadenopathy{change}.",
        ),
        sizes=per_kind(*["modest|distinct|considerable"] * 6),
        changes=", appearing|, larger|, smaller",
        names=SHORT_NAMES,
        resolved="I note resolution of {names}.",
        bones=("I find the bones strong.", "I find the bones thinned."),
    ),
)

STYLE_6 = (
    Wording(  # from top to bottom of the chest
        opening=("Axial images from apex to base.", "Axial images from apex to base, second look."),
        sections=(
            (("nodule",), "Upper lobes: clear."),
            (("lymphadenopathy",), "Central compartment: slender."),
            (("consolidation",), "Lower lobes: clear."),
            (("effusion",), "Recesses: empty."),
            (("cardiomegaly",), "Cardiac outline: slim."),
            (("emphysema",), ""),
            ((BONES,), ""),
        ),
        found=per_kind(
            "Recesses: {size} layer of {side} pleural fluid{change}.",
            "Lower lobes: {size} area of {side} airspace opacity{change}.",
            "Upper lobes: {size} {side} nodule{change}.",
            "All lobes: {size} emphysema{change}.",
            "Cardiac outline: {size} enlarged{change}.",
            "Central compartment: {size} adenopathy{change}.",
        ),
        sizes=per_kind(
            "thin|thick|deep",
            "narrow|wide|vast",
            "pea sized|grape sized|plum sized",
            "sparse|diffuse|dense",
            "barely|plainly|hugely",
            "sparse|diffuse|dense",
        ),
        changes=", fresh|, gaining|, fading",
        names=SHORT_NAMES,
        resolved="Since then cleared: {names}.",
        bones=("Vertebrae: regular.", "Vertebrae: degenerative."),
    ),
    Wording(  # seen and not seen
        opening=("Checklist of the scan.", "Checklist of the scan, prior available."),
        sections=(
            ((BONES,), ""),
            (("consolidation", "effusion"), "Item fluid or infiltrate: negative."),
            (("nodule",), "Item tumour: negative."),
            (("lymphadenopathy",), "Item glands: negative."),
            (("emphysema", "cardiomegaly"), "Item chronic disease: negative."),
        ),
        found=per_kind(
            "Item fluid: positive, {size} {side} effusion{change}.",
            "Item infiltrate: positive, {size} {side} consolidation{change}.",
            "Item tumour: positive, {size} {side} nodule{change}.",
            "Item chronic disease: positive, {size} emphysema{change}.",
            "Item chronic disease: positive, {size} cardiomegaly{change}.",
            "Item glands: positive, {size} lymphadenopathy{change}.",
        ),
        sizes=per_kind(*["class one|class two|class three"] * 6),
        changes=", begun|, risen|, fallen",
        names=SHORT_NAMES,
        resolved="Item closed, resolved: {names}.",
        bones=("Item skeleton: negative.", "Item skeleton: positive, degeneration."),
    ),
)
