"""Phrases of the 14 CheXpert classes, for reports of chest radiographs."""

from __future__ import annotations

from functools import cache

from fedtar_flare.metrics.labeler import Observation, RuleLabeler

NO_FINDING = "No Finding"
SUPPORT_DEVICES = "Support Devices"

_HEART = "heart|cardiac|cardio"
_SILHOUETTE = "cardiac|heart|cardiomediastinal|cardiopericardial|cardiovascular"
_LARGE = "enlarged|large|prominent|increased|widened|dilated|enlargement|cardiomegaly|bigger"
_NORMAL = "normal|unremarkable|normally"
_OPACITY = "opacit*|opacification*|densit*|infiltrate*|infiltration*|shadow*|haziness|haze"

OBSERVATIONS = (
    Observation(
        "Enlarged Cardiomediastinum",
        present="""
            enlarged|widened|wide|prominent|dilated mediastin*, enlarged|widened|prominent cardiomediastin*,
            enlarged|widened|prominent _ mediastin* contour*|silhouette*|width,
            enlargement|widening|prominence of the mediastin*, enlargement|widening|prominence of the cardiomediastin*,
            enlargement|widening|prominence of the superior|upper|anterior mediastin*,
            mediastin* widening|enlargement|prominence|fullness|mass*, mediastin* _ enlarged|widened|wide|prominent,
            cardiomediastin* _ enlarged|widened|prominent, cardiomediastin* enlargement|widening|prominence,
            superior mediastin* widening, enlarged|prominent cardiac and mediastin*,
            heart|cardiac and mediastin* _ enlarged|widened""",
        absent=f"""
            mediastin* _ within normal, mediastin* _ {_NORMAL}, {_NORMAL} mediastin*, {_NORMAL} cardiomediastin*,
            cardiomediastin* _ {_NORMAL}, cardiomediastin* _ within normal,
            {_NORMAL} cardiac and mediastin*, {_NORMAL} heart and mediastin*, {_NORMAL} heart size and mediastin*,
            {_NORMAL} cardiac _ mediastin*, mediastin* _ not widened|enlarged, {_NORMAL} _ mediastin* contour*,
            mediastin* _ intact, mediastin* _ midline""",
        unsure="mediastin* _ stable|unchanged, cardiomediastin* _ stable|unchanged, stable|unchanged cardiomediastin*",
    ),
    Observation(
        "Cardiomegaly",
        present=f"""
            cardiomegaly, cardiac enlargement, cardiac decompensation, enlargement of the heart|cardiac,
            enlargement of cardiac, {_LARGE} {_HEART}, {_LARGE} _ {_HEART} silhouette|size|shadow|contour*,
            {_SILHOUETTE} silhouette _ {_LARGE}, {_HEART} _ enlarged|dilated|large, heart|cardiac size _ {_LARGE},
            {_HEART} contour* _ {_LARGE}, heart shadow _ {_LARGE}, ventric* enlargement|dilatation|dilation,
            atri* enlargement|dilatation|dilation, enlarged _ ventric*|atri*, biventricular enlargement,
            dilated cardiomyopathy, cardiothoracic ratio _ increased|enlarged|elevated, increased cardiothoracic ratio,
            globular heart, globular cardiac, boot shaped heart""",
        absent=f"""
            heart|cardiac _ {_NORMAL}, heart|cardiac _ within normal, heart|cardiac size {_NORMAL},
            {_NORMAL} heart, {_NORMAL} cardiac, {_NORMAL} _ heart size|silhouette|contour*, {_NORMAL} cardiomediastinal,
            {_NORMAL} cardiopericardial, {_SILHOUETTE} silhouette _ {_NORMAL}, {_SILHOUETTE} silhouette _ within normal,
            {_SILHOUETTE} contour* _ {_NORMAL}, heart size and _ {_NORMAL}, cardiac size and _ {_NORMAL},
            heart and _ {_NORMAL}, {_NORMAL} size heart, {_NORMAL} sized heart, heart _ {_NORMAL} in size,
            {_NORMAL} size of the heart, heart size {_NORMAL}, size of the heart is {_NORMAL}""",
        unsure="""
            heart|cardiac _ top normal|limits, heart|cardiac _ borderline, borderline heart|cardiac, top normal heart,
            borderline cardiomegaly, borderline _ heart|cardiac size, borderline enlarged, upper limits of normal,
            upper limit of normal, heart|cardiac size _ stable|unchanged, stable|unchanged heart|cardiac size,
            heart|cardiac _ top of normal, heart|cardiac silhouette _ stable|unchanged, heart _ stable|unchanged,
            stable|unchanged cardiac silhouette""",
        ignore="enlarged cardiophrenic, heart failure, heart rate, cardiac device*, cardiac monitor*, cardiac surgery",
    ),
    Observation(
        "Lung Opacity",
        present=f"""
            {_OPACITY}, air space|airspace disease*|opacit*|consolidation*|process*, ground glass, groundglass,
            reticular _ pattern|marking*|change*, reticulation*,
            interstitial marking*|pattern|change*|disease*|prominence,
            interstitial lung disease, interstitial process, increased _ marking*, prominent _ interstitial|marking*,
            bronchovascular crowding, alveolar process|disease, parenchymal disease|process|abnormalit*, scarring, scar,
            fibrosis, fibrotic change*, peribronchial cuffing, peribronchial thickening, bronchial wall thickening,
            patchy airspace, haziness""",
        absent="lung* _ without opacit*",
        ignore="""
            bone|bony|osseous densit*, densit* of the bone*, vascular opacification, metallic densit*, calcific densit*,
            nipple shadow*, shadow of the nipple*, contrast opacification, bone mineral densit*, soft tissue densit*,
            nodular opacit*, nodular densit*, rounded opacit*, mass like opacit*, masslike opacit*, pleural scarring,
            apical pleural scarring, pleural opacit*, mineral densit*, breast densit*, breast shadow*, heart shadow,
            cardiac shadow, mediastinal shadow""",
    ),
    Observation(
        "Lung Lesion",
        present="""
            nodule*, nodular opacit*|densit*|lesion*, nodularit*, mass, masses, mass like, masslike, tumor*, tumour*,
            neoplasm*, malignan*, carcinoma*, cancer*, metasta*, lesion*, granuloma*, cavit*, cavitary lesion*,
            rounded opacit*|densit*, lung|pulmonary lesion*, coin lesion*, hamartoma*, pulmonary cyst*, bulla*""",
        ignore="""
            mediastinal mass*, hilar mass*, bone|bony|osseous|rib|skeletal|lytic|sclerotic|blastic lesion*,
            lesion* of|in the bone*|rib*, thyroid nodule*|mass*|lesion*, breast cancer|mass*|carcinoma,
            hepatic|liver|renal|adrenal|splenic lesion*|mass*|nodule*, body mass, osseous metasta*, bone metasta*,
            pleural cavit*, abdominal cavit*, thoracic cavit*, chest cavit*, oral cavit*, mass effect, muscle mass""",
    ),
    Observation(
        "Edema",
        present="""
            edema, oedema, edematous, heart failure, chf, vascular|pulmonary|central|venous congestion,
            congestive change*,
            congestion, congestive failure, vascular engorgement|redistribution|prominence|plethora, fluid overload,
            volume overload, cephalization, kerley, septal line*, pulmonary venous hypertension, hydrostatic,
            vascular _ engorged|indistinct|prominent, indistinct _ vascul*, cardiac decompensation, interstitial edema,
            increased|prominent pulmonary vascul*, engorged|engorgement _ vascul*, upper zone redistribution""",
        absent="pulmonary vascul* _ normal|unremarkable, normal pulmonary vascul*, vascularity _ normal|unremarkable",
        ignore="soft tissue edema, subcutaneous edema, bone marrow edema, chest wall edema, history of heart failure",
    ),
    Observation(
        "Consolidation",
        present="consolidat*, airspace consolidation*, hepatization",
        ignore="no focal air space",
    ),
    Observation(
        "Pneumonia",
        present="""
            pneumonia*, bronchopneumonia*, infection*, infectious, pneumonitis, infectious process*,
            aspiration pneumon*,
            pneumonic, covid*, tuberculosis, abscess*""",
        ignore="""
            urinary infection*, wound infection*, aspiration precautions, line infection*, radiation pneumonitis,
            history of pneumonia, granulomatous infection*, prior|old|remote granulomatous infection*""",
    ),
    Observation(
        "Atelectasis",
        present="""
            atelecta*, collapse of the _ lobe|lung, lobar collapse, lung collapse, collapsed _ lobe|lung, lobe collapse,
            volume loss, loss of _ volume, subsegmental collapse, lower lobe collapse, collapse""",
        ignore="vertebral collapse, collapse of the vertebra*, vertebral body collapse, compression collapse",
    ),
    Observation(
        "Pneumothorax",
        present="pneumothora*, hydropneumothora*, hemopneumothora*, pleural air, air in the pleural, deep sulcus sign",
        ignore="pneumothorax protocol",
    ),
    Observation(
        "Pleural Effusion",
        present="""
            effusion*, pleural effusion*, pleural _ effusion*, pleural fluid|liquid|collection*, hydrothora*,
            hemothora*,
            haemothora*, hydropneumothora*, hemopneumothora*, subpulmonic fluid, subpulmonic effusion*, empyema*,
            fluid in the pleural|fissure*, blunting of the _ costophrenic|sulcus|angle*, blunted _ costophrenic,
            blunting of _ costophrenic, costophrenic _ blunted|blunting|obscured, costophrenic|sulcus blunting,
            chylothora*, fissural fluid, fluid in the _ fissure*, layering fluid, pleural spaces _ fluid""",
        absent="""
            costophrenic _ clear|sharp|sharply|preserved, clear|sharp costophrenic, pleural spaces _ clear,
            pleural space is clear, clear pleural spaces, pleura _ normal|unremarkable|clear""",
        ignore="""
            pericardial effusion*, joint effusion*, pericardial and joint effusion*, knee effusion*,
            effusion of the knee,
            pericardial fluid|collection*""",
    ),
    Observation(
        "Pleural Other",
        present="""
            pleural thickening, thickening of the pleura, thickened pleura, pleural plaque*, pleural scar*,
            pleural calcification*, calcified pleura*, fibrothorax, pleural based _ mass|opacit*|nodul*|densit*,
            pleural based, pleural mass*, pleural disease, pleural abnormalit*, pleural parenchymal scarring,
            pleuroparenchymal scar*, apical thickening, apical cap, apical capping, pleural fibrosis, pleural tag*,
            pleural reaction, pleural adhesion*, biapical pleural, pleural change*, pleural lesion*, pleural nodul*""",
    ),
    Observation(
        "Fracture",
        present="""
            fracture*, fractured, compression deformit*, wedge deformit*, rib deformit*, vertebral deformit*, wedging,
            compression of the _ vertebra*, vertebral compression, vertebral _ compression, broken rib*,
            dislocation*""",
        absent="bony structures _ intact, osseous structures _ intact, bones _ intact, ribs _ intact",
        ignore="fracture of the wire*|catheter*|lead*, fractured wire*|lead*|catheter*, bowel compression",
    ),
    Observation(
        SUPPORT_DEVICES,
        present="""
            tube*, line, lines, catheter*, picc, port, ports, portacath, port a cath, mediport, chemoport, infusaport,
            pacemaker*, pacer*, aicd, icd, defibrillator*, lead, leads, stent*, swan, swan ganz, sternal wire*,
            sternotomy wire*, median sternotomy, cabg clip*, surgical clip*, surgical clips, clip, clips, suture*,
            drain*,
            drainage catheter*, pigtail*, dobhoff, dobbhoff, nasogastric, orogastric, enteric tube*, et, ett,
            endotracheal, tracheostomy, valve*, prosthes*, prosthetic, valve replacement, balloon pump, iabp, ecmo,
            impella, lvad, hardware, rod, rods, screw*, device*, monitor*, electrode*, wires, wire, cannula*, sheath,
            hickman, chest tube*, thoracostomy, loop recorder, generator, gastric band, feeding tube*, coil, coils,
            spinal fusion, internal fixation, intubated, anastomotic staple*, staple*, shunt""",
        ignore="""
            line*|lines of demarcation, kerley line*, kerley b line*, septal line*, fissure line*, mid line, midline,
            pleural line*, skin line*, paratracheal line*, paraspinal line*, first line, base line, line of pleura*,
            anterior junction line, mediastinal line*, fracture line*, valve plane, ports of, drainage of,
            leads|lead to, valve disease, valvular, skin fold, draining""",
    ),
)
"""Thirteen classes; ``No Finding`` follows from the others."""


@cache
def chexpert_labeler() -> RuleLabeler:
    """Labels of the 14 CheXpert classes by rules.

    ``No Finding`` is positive where no other class is positive or uncertain, support devices aside, else blank. A heart
    or mediastinum that is only called stable, or at the limit of normal, is uncertain.
    """
    return RuleLabeler(OBSERVATIONS, no_finding=NO_FINDING, beside=frozenset({SUPPORT_DEVICES}))
