"""Phrases of the 18 CT-RATE classes, for reports of chest CT."""

from __future__ import annotations

from functools import cache

from fedtar_flare.metrics.labeler import Observation, RuleLabeler

_CALCIFIC = "calcif*|calcific*|atheroma*|atheroscler*|plaque*|stent*"
_ORGANS = """
    thyroid, liver, hepatic, adrenal, kidney*, renal, spleen, splenic, breast*, pancrea*, bladder, prostat*, vertebra*,
    bone*, skin, subcutaneous, stomach, gastric, abdom*, ovar*, uter*, gallbladder, surrenal, humer*, sternum, scapul*,
    parotid, peritone*, omentum, mesenter*, intestin*, colon*"""
_LUNG = "lung*, pulmonary, lobe, lobes, lingula*, segment*, parenchym*, fissure*, subpleural, basal"

OBSERVATIONS = (
    Observation(
        "Medical material",
        present="""
            catheter*, port chamber, port, stent*, stented, pacemaker*, pace maker, tube, tubes, cannula*, prosthe*,
            suture*, clip*, sternotomy, electrode*, wire*, metallic material*, metallic suture*, drain, drains, valve
            replacement, bypass*, graft*, icd, screw*, implant*, plate, surgical material*, operation material*,
            material*, tracheostomy, nasogastric, device*, filter, coil*, silicone, mesh, fixator*, stabilizer*,
            band, metallic density, metallic densities""",
        ignore="contrast material*, no contrast material, iv contrast, bone graft, contrast material uptake",
    ),
    Observation(
        "Arterial wall calcification",
        present=f"""
            {_CALCIFIC} _ aort*, {_CALCIFIC} _ arter*, {_CALCIFIC} _ vascular|vessel*, aort* _ {_CALCIFIC},
            arter* _ {_CALCIFIC}, vascular|vessel* _ {_CALCIFIC}, atheroma*, atheroscler*,
            wall|walls calcif*, calcif*|calcific plaque*""",
        ignore="""
            coronary arter* _ calcif*|calcific*|atheroma*|plaque*|atheroscler*, coronary _ calcif*|calcific*|atheroma*|plaque*,
            calcif*|calcific*|atheroma* _ coronary, calcif*|calcific*|atheroma* plaque* _ coronary,
            coronary atheroscler*, coronary arter*, pleural plaque*, calcif*|calcific pleural plaque*, pleural calcif* plaque*""",
    ),
    Observation(
        "Cardiomegaly",
        present="""
            cardiomegaly, heart size _ increased|enlarged|larger|above|increase, heart _ enlarged|larger|increased,
            enlarged heart, increase|increased in heart size, increase|increased in the size of the heart,
            cardiothoracic index|ratio _ increased|increase|favor, increased heart size, heart dimensions _ increased,
            cardiac _ enlarged|increased|enlargement, increased cardiothoracic, heart size _ larger, cardiac dilatation,
            increased cardiac, atri* _ dilat*|enlarged|dilated|increased, ventric* _ dilat*|enlarged|dilated|increased,
            heart dimensions _ above, cardiomyopathy, cardiac size _ increased|enlarged, cardiac dimensions _ increased""",
        absent="heart _ normal, heart contour|size _ normal, cardiothoracic index _ normal",
    ),
    Observation(
        "Pericardial effusion",
        present="""
            pericardial effusion*, pericardial _ effusion*, pericardial fluid*, fluid _ pericardi*, effusion _ pericardi*,
            pericardial space _ effusion|fluid, pericardium _ effusion|fluid, pericardial thickening and effusion""",
        absent="pericardial _ normal",
    ),
    Observation(
        "Coronary artery wall calcification",
        present="""
            coronary _ calcif*|calcific*|atheroma*|plaque*|atheroscler*|stent*, coronary arter* _ calcif*|calcific*|atheroma*|plaque*,
            calcif*|calcific*|atheroma*|plaque* _ coronary, calcif*|calcific* plaque* _ coronary, lad _ calcif*|calcific*|stent*|atheroma*,
            calcif*|calcific*|atheroma* _ lad, plaque* _ the coronary, aorta and coronary arter* _ calcif*, stent* _ coronary,
            calcif*|calcific|atheroma* plaque* _ aort* and coronary, aort* and _ coronary""",
    ),
    Observation(
        "Hiatal hernia",
        present="hiatal hernia*, hiatus hernia*, hernia*, hiatal _ hernia*, hiatal",
        ignore="umbilical hernia*, inguinal hernia*, ventral hernia*, bochdalek hernia*, morgagni hernia*, disc hernia*",
    ),
    Observation(
        "Lymphadenopathy",
        present="""
            lymph node*, lymphadenopath*, lap, laps, lymphadenomegal*, adenopath*, lymphadenomegaly, lymph nodules, lymph adenopathy*""",
        ignore="intrapulmonary lymph node*, intraparenchymal lymph node*",
    ),
    Observation(
        "Emphysema",
        present="emphysem*, emphysematous, bulla*, bullous, bleb*, air cyst*",
        ignore="subcutaneous emphysema, emphysema _ subcutaneous",
    ),
    Observation(
        "Atelectasis",
        present="atelecta*, collapse*, volume loss, loss of volume",
        ignore="vertebra* _ collapse*, collapse* _ vertebra*",
    ),
    Observation(
        "Lung nodule",
        present="nodul*, nodules, mass, masses, metasta*",
        ignore="nodular goiter, tree in bud _ nodul*, lymph nodul*, nodular _ thickening, mass lesion",
        elsewhere=_ORGANS,
        here="lung*, pulmonary",
    ),
    Observation(
        "Lung opacity",
        present="""
            ground glass, opacit*, infiltrat*, consolidat*, density increase*|increases, increased density, increase in density,
            density area*, pneumonia, crazy paving, budding tree, acinar""",
        absent="",
        elsewhere=_ORGANS,
        here=_LUNG,
    ),
    Observation(
        "Pulmonary fibrotic sequela",
        present="""
            sequel*, fibrotic*, fibrosis, fibroatelect*, pleuroparenchymal, honeycomb*, scar*, fibro*, band*, linear density,
            linear densities, linear atelecta*, traction bronchiect*, reticul*""",
    ),
    Observation(
        "Pleural effusion",
        present="""
            pleural effusion*, pleural _ effusion*, effusion*, pleural fluid*, hydrothora*, fluid _ pleura*, hemothora*,
            empyema*, hydropneumothora*, fluid _ hemithora*, pleural _ fluid""",
        ignore="pericardial effusion*, pericardial _ effusion*, effusion _ pericardi*, joint effusion*",
    ),
    Observation(
        "Mosaic attenuation pattern",
        present="mosaic, air trapping",
    ),
    Observation(
        "Peribronchial thickening",
        present="""
            peribronchial thicken*, peribronchial _ thicken*, bronchial wall thicken*, bronchial _ thicken*,
            thicken* _ bronchial wall*, thicken* _ bronch*, bronch* wall* _ thick*, thicken* _ peribronchial,
            peribronchial _ density|densities, increase in _ bronchial wall, bronch* _ wall thick*""",
    ),
    Observation(
        "Consolidation",
        present="consolidat*, airspace opacit*",
    ),
    Observation(
        "Bronchiectasis",
        present="bronchiecta*, bronchiolectas*, bronch* _ dilat*, dilat* _ bronch*, ectasia _ bronch*, bronch* _ ectasia",
    ),
    Observation(
        "Interlobular septal thickening",
        present="""
            septal thicken*, interlobular _ thicken*, septal _ thicken*, septum* _ thicken*, thicken* _ sept*,
            interlobular sept*, sept* _ thicken*, crazy paving, septal line*""",
    ),
)
"""Eighteen classes in CT-RATE's order."""


@cache
def ctrate_labeler() -> RuleLabeler:
    """Labels of the 18 CT-RATE classes by rules. CT-RATE's own labels are 0 or 1."""
    return RuleLabeler(OBSERVATIONS)
