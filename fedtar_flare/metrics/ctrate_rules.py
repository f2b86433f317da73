"""Phrases of the 18 CT-RATE classes, for reports of chest CT."""

from __future__ import annotations

from functools import cache

from fedtar_flare.metrics.labeler import Observation, RuleLabeler

_CALCIFIC = "calcif*|calcific*|atheroma*|atherom*|atrom*|atheroscler*|plaque*"
_CORONARY = "coronary|coronaries|lad|rca|circumflex|cx"
_ORGANS = """
    thyroid, liver, hepatic, adrenal, kidney*, renal, spleen, splenic, breast*, pancrea*, bladder, prostat*, vertebra*,
    bone*, skin, subcutaneous, stomach, gastric, abdom*, ovar*, uter*, gallbladder, surrenal, humer*, sternum, scapul*,
    parotid, peritone*, omentum, mesenter*, intestin*, colon*"""
_LUNG = "lung*, pulmonary, lobe, lobes, lingula*, segment*, parenchym*, fissure*, subpleural, basal"

OBSERVATIONS = (
    Observation(
        "Medical material",
        present="""
            catheter*, port chamber, port, stent*, pacemaker*, pace maker, tube, tubes, cannula*, prosthe*,
            suture material*, metallic suture*, sutures, surgical suture*, clip*, sternotomy, electrode*, wire*,
            metallic,
            drain, drains, valve replacement, graft*, icd, screw*, silicone, breast implant*, implant _ breast*,
            stabil* material*, fixat* material*, surgical material*, operation material*, operative material*,
            tracheostomy, nasogastric, device*, filter, coil*, plaque screw*, medical material*, battery""",
        ignore="""
            contrast material*, bone graft*, bile duct stent*, choledoch* _ stent*, stent __ bile duct, duct _ stenting,
            eustachian tube*, filter paper""",
    ),
    Observation(
        "Arterial wall calcification",
        present=f"""
            {_CALCIFIC} __ aort*|arcus|arter*|vascular|vessel*|supraaortic, aort*|arcus|supraaortic __ {_CALCIFIC},
            arter* _ {_CALCIFIC}, vascular|vessel* _ {_CALCIFIC}, atheroma*, calcific|calcified plaque*""",
        ignore="pleural plaque*, calcif*|calcific pleural plaque*, pleura* __ plaque*, plaque* __ pleura*",
        elsewhere=f"{_CORONARY.replace('|', ', ')}, left anterior descending, abdominal",
        here="aorta, arch, arcus, ascending, supraaortic, thoracic, mediastinal, main vascular, subclavian, carotid",
    ),
    Observation(
        "Cardiomegaly",
        present="""
            cardiomegaly, heart size : _ enlarged, enlarged cardiac, cardiac outline : _ enlarged,
            heart _ larger than normal, ctr increase*, ctr _ increase*,
            heart size _ increased|enlarged|larger|above|increase, heart _ enlarged|larger|increased,
            enlarged heart, increase|increased in heart size, increase|increased in the size of the heart,
            cardiothoracic index|ratio _ increased|increase|favor, increased heart size, heart dimensions _ increased,
            cardiac _ enlarged|increased|enlargement, increased cardiothoracic, heart size _ larger, cardiac dilatation,
            increased cardiac, atri* _ dilat*|enlarged|dilated|increased, ventric* _ dilat*|enlarged|dilated|increased,
            heart dimensions _ above, cardiomyopathy, cardiac size _ increased|enlarged,
            cardiac dimensions _ increased""",
        absent="heart _ normal, heart contour|size _ normal, cardiothoracic index _ normal",
    ),
    Observation(
        "Pericardial effusion",
        present="""
            pericardial effusion*, pericardial _ effusion*, pericardial fluid*, fluid|effusion __ pericardi*,
            pericardial|pericardium __ effusion|fluid, hemopericard*, tamponade""",
        absent="pericardial _ normal",
        ignore="pericardial _ pleural effusion*",
    ),
    Observation(
        "Coronary artery wall calcification",
        present=f"""
            {_CORONARY} __ {_CALCIFIC}, {_CALCIFIC} __ {_CORONARY}, {_CALCIFIC} __ left anterior descending,
            left anterior descending __ {_CALCIFIC}, {_CORONARY} __ stent*, stent* __ {_CORONARY}""",
    ),
    Observation(
        "Hiatal hernia",
        present="hiatal hernia*, hiatus hernia*, hernia*, hiatal _ hernia*, hiatal",
        ignore="""
            umbilical hernia*, inguinal hernia*, ventral hernia*, bochdalek hernia*, morgagni hernia*, disc
            hernia*""",
    ),
    Observation(
        "Lymphadenopathy",
        present="""
            lymph node*, lymphadenopath*, lap, laps, lymphadenomegal*, adenopath*, lymph nodules, lymph adenopathy*,
            mediastinal nodes, hilar nodes, enlarged node*""",
        absent="lymph node* _ normal, lymph node* : normal|unremarkable, normal lymph node*",
        ignore="intrapulmonary lymph node*, intraparenchymal lymph node*",
    ),
    Observation(
        "Emphysema",
        present="emphysem*, emphysematous, bulla*, bullous, bleb*",
        ignore="subcutaneous emphysema, emphysema _ subcutaneous",
    ),
    Observation(
        "Atelectasis",
        present="atelecta*, atelecti*, collapse*",
        ignore="vertebra* _ collapse*, collapse* _ vertebra*",
    ),
    Observation(
        "Lung nodule",
        present="nodul*, masses, metasta*",
        ignore="""
            nodular goiter, nodular ground, nodular consolidat*, nodular density, nodular densities, nodular opacit*,
            tree in bud _ nodul*, lymph nodul*, nodular _ thicken*, nodular thicken*, mass lesion, pleural nodul*,
            ground glass nodul*, nodular infiltrat*, mass effect, mass or filling defect, nodular appearance of the""",
        elsewhere=_ORGANS,
        here="lung*, pulmonary",
    ),
    Observation(
        "Lung opacity",
        present="""
            ground glass, groundglass, opacit*, density area*, dependent|depandant density|densities, dependent
            increase*""",
        ignore="ground glass nodul*, micronodular opacit*",
        elsewhere=_ORGANS,
        here=_LUNG,
    ),
    Observation(
        "Pulmonary fibrotic sequela",
        present="""
            sequel*, fibrotic*, fibrosis, fibroatelect*, pleuroparenchymal, pleural parenchymal, scar*, fibro*, band,
            bands, parenchymal band*, linear densities""",
        ignore="band atelecta*, band atelecti*, band like, fibroadenom*",
        elsewhere="kidney*, renal, rib, ribs, fracture*",
        here="lung*, pleuroparenchymal",
    ),
    Observation(
        "Pleural effusion",
        present="""
            pleural effusion*, pleural _ effusion*, effusion*, pleural fluid*, hydrothora*, fluid _ pleura*, hemothora*,
            empyema*, hydropneumothora*, fluid _ hemithora*, pleural _ fluid""",
        ignore="""
            pericardial effusion*, pericardial _ effusion*, effusion __ pericardial|pericardium, joint effusion*,
            perirenal __ effusion*, effusion* __ perirenal""",
    ),
    Observation(
        "Mosaic attenuation pattern",
        present="mosaic, air trapping",
    ),
    Observation(
        "Peribronchial thickening",
        present="""
            peribronchial|peribronchovascular|peribroncovascular __ thick*, thick* _ peribronch*,
            increase* _ peribronch* thick*, bronchial _ thick*, bronch* wall* _ thick*, thick* _ bronch*""",
        absent="""
            no increase _ peribronchial wall thick*, no increase _ peribronchial thick*, no increase _ bronchial
            wall thick*""",
    ),
    Observation(
        "Consolidation",
        present="consolidat*, airspace opacit*|disease*",
    ),
    Observation(
        "Bronchiectasis",
        present="""
            bronchiecta*, bronchiolectas*, bronch* _ dilat*, dilat* _ bronch*, ectasia _ bronch*, bronch* _
            ectasia""",
    ),
    Observation(
        "Interlobular septal thickening",
        present="""
            septal thicken*, interlobular _ thicken*, septal _ thicken*, septum* _ thicken*, thicken* _ sept*,
            sept* _ thicken*, septal line*""",
    ),
)
"""Eighteen classes in CT-RATE's order."""


@cache
def ctrate_labeler() -> RuleLabeler:
    """Labels of the 18 CT-RATE classes by rules. CT-RATE's own labels are 0 or 1."""
    return RuleLabeler(OBSERVATIONS)
