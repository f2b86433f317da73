"""Sentences of chest radiograph reports, written for the tests, with the labels that a reader gives them.

Classes by initials, then ``+`` positive, ``-`` negative, ``?`` uncertain; what is not named is blank. ``No Finding`` is
not listed: it follows from the others.
"""

CLASSES = {
    "EC": "Enlarged Cardiomediastinum",
    "CM": "Cardiomegaly",
    "LO": "Lung Opacity",
    "LL": "Lung Lesion",
    "ED": "Edema",
    "CO": "Consolidation",
    "PN": "Pneumonia",
    "AT": "Atelectasis",
    "PX": "Pneumothorax",
    "PE": "Pleural Effusion",
    "PO": "Pleural Other",
    "FX": "Fracture",
    "SD": "Support Devices",
}
_SIGNS = {"+": "positive", "-": "negative", "?": "uncertain"}

SENTENCES = [
    # stated
    ("There is a small right pleural effusion.", "PE+"),
    ("Moderate cardiomegaly with pulmonary vascular congestion.", "CM+ ED+"),
    ("The heart is mildly enlarged.", "CM+"),
    ("The cardiac silhouette is enlarged.", "CM+"),
    ("Left lower lobe consolidation consistent with pneumonia.", "CO+ PN+"),
    ("Large left pneumothorax with collapse of the left lung.", "PX+ AT+"),
    ("Widened mediastinum.", "EC+"),
    ("A 1.5 cm nodule in the right upper lobe.", "LL+"),
    ("Old healed rib fractures on the left.", "FX+"),
    ("Biapical pleural thickening.", "PO+"),
    ("The endotracheal tube ends 4 cm above the carina.", "SD+"),
    ("Patchy opacities at both lung bases.", "LO+"),
    ("Blunting of the left costophrenic angle.", "PE+"),
    ("Hydropneumothorax on the right.", "PX+ PE+"),
    # denied by what stands before
    ("No pleural effusion.", "PE-"),
    ("There is no evidence of pneumothorax or pleural effusion.", "PX- PE-"),
    ("No edema, effusion, or pneumothorax.", "ED- PE- PX-"),
    ("Lungs are clear without consolidation.", "CO-"),
    ("Negative for pneumonia.", "PN-"),
    ("The lungs are free of consolidation and effusion.", "CO- PE-"),
    ("No focal consolidation, large effusion or pneumothorax.", "CO- PE- PX-"),
    ("Neither effusion nor pneumothorax.", "PE- PX-"),
    ("Absence of pulmonary edema.", "ED-"),
    ("No acute rib fracture is identified.", "FX-"),
    ("No definite pneumothorax.", "PX-"),
    ("No new focal consolidation.", "CO-"),
    ("Resolution of the right effusion.", "PE-"),
    ("The heart is not enlarged.", "CM-"),
    ("Interval removal of the endotracheal tube.", "SD-"),
    # denied by what stands behind
    ("Pleural effusion was not observed.", "PE-"),
    ("Pleural effusion and pneumothorax are not seen.", "PE- PX-"),
    ("The previously seen effusion has resolved.", "PE-"),
    ("Pneumothorax: none.", "PX-"),
    ("Consolidation is absent.", "CO-"),
    ("The left chest tube has been removed.", "SD-"),
    ("Edema has cleared.", "ED-"),
    ("The right pneumothorax is no longer seen.", "PX-"),
    # normal by itself
    ("Heart size is normal.", "CM-"),
    ("Normal heart size.", "CM-"),
    ("Cardiomediastinal silhouette is unremarkable.", "EC- CM-"),
    ("The mediastinum is within normal limits.", "EC-"),
    ("Costophrenic angles are sharp.", "PE-"),
    ("The heart is normal in size.", "CM-"),
    ("Pulmonary vascularity is normal.", "ED-"),
    # in doubt
    ("Possible small left effusion.", "PE?"),
    ("Pneumonia cannot be excluded.", "PN?"),
    ("Cannot exclude a small pneumothorax.", "PX?"),
    ("Findings may represent atelectasis or pneumonia.", "AT? PN?"),
    ("Opacity at the left base, suspicious for pneumonia.", "LO+ PN?"),
    ("Atelectasis versus pneumonia at the right base.", "AT? PN?"),
    ("Pneumonia?", "PN?"),
    ("Consolidation (pneumonia?) in the lingula.", "CO+ PN?"),
    ("An effusion is suspected on the left.", "PE?"),
    ("Pneumonia is possible.", "PN?"),
    ("Questionable nodule in the left apex.", "LL?"),
    ("Superimposed infection is not excluded.", "PN?"),
    ("Left basilar opacity, likely atelectasis.", "LO+ AT?"),
    ("Heart size is top normal.", "CM?"),
    ("Superimposed pneumonia is difficult to exclude.", "PN?"),
    ("This could reflect edema.", "ED?"),
    # looks like a denial and is none
    ("No change in effusion.", "PE+"),
    ("No significant interval change in the right pneumothorax.", "PX+"),
    ("Without change in bilateral effusions.", "PE+"),
    ("The effusion has not changed.", "PE+"),
    ("The consolidation has not resolved.", "CO+"),
    ("No increase in the known effusion.", "PE+"),
    ("No improvement of the edema.", "ED+"),
    ("Not only effusion, but also atelectasis.", "PE+ AT+"),
    ("The pacemaker leads have not changed.", "SD+"),
    # clauses
    ("No pneumothorax, small left effusion.", "PX- PE+"),
    ("No effusion but there is atelectasis.", "PE- AT+"),
    ("Cardiomegaly without overt edema.", "CM+ ED-"),
    ("No pneumothorax is seen, and the heart is enlarged.", "PX- CM+"),
    ("The heart is enlarged, and pleural effusion was not observed.", "CM+ PE-"),
    ("Small effusion, no pneumothorax.", "PE+ PX-"),
    ("No consolidation; however, atelectasis is present.", "CO- AT+"),
    ("Atelectasis is present, although pneumonia cannot be excluded.", "AT+ PN?"),
    ("No edema except for mild interstitial markings.", "ED- LO+"),
    ("Effusion has resolved while atelectasis persists.", "PE- AT+"),
    ("No pneumonia. Possible effusion. Atelectasis.", "PN- PE? AT+"),
    ("Effusion has increased and there is no pneumothorax.", "PE+ PX-"),
    ("Right picc line, no pneumothorax.", "SD+ PX-"),
    ("Pneumonia is unlikely, but atelectasis is seen.", "PN- AT+"),
    # other things with the same words
    ("Moderate pericardial effusion.", ""),
    ("Joint effusion of the knee.", ""),
    ("Lytic lesion in the left clavicle.", ""),
    ("Kerley B lines.", "ED+"),
    ("History is not given.", ""),
    ("Reported with 1.5 mm slices.", ""),
    # several mentions: the strongest counts
    ("No effusion on the left. Effusion on the right.", "PE+"),
    ("Possible pneumonia. No pneumonia on the left.", "PN?"),
    ("NO PNEUMOTHORAX.\nSMALL EFFUSION ON THE\nRIGHT.", "PX- PE+"),
    ("1. No pneumothorax\n2. Left effusion", "PX- PE+"),
]


def expected(marks):
    """``"PE+ PX-"`` as class to label."""
    return {CLASSES[mark[:2]]: _SIGNS[mark[2]] for mark in marks.split()}
