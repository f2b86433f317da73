"""What FedMRG exchanges: generic factors, the encoder's parameters, the diagnosis branch, rows of image features.

The rows are personal data: with one patient a row, whoever has image and encoder can tell that the patient is in the
bank. No group holds the specialised adapter: its tensors have other names.
"""

from dataclasses import replace

from fedtar_flare.methods.fedmrg.bank import MOST_ROWS, WIDEST
from fedtar_flare.protocol.contract import HEAD_NAMES, PARAMETERS, Contract, Field, Group, close_round, handshake, train

ADAPTER = Group("adapter", "averaged", ("base_model.model.*.lora_[AB].generic.weight",), "the generic low-rank factors")
BRANCH = Group(
    "branch",
    "averaged",
    (HEAD_NAMES, "diagnosis.embeddings"),
    "the diagnosis branch: a head on the encoder, and the prompts' embeddings",
)
BANK = Group(
    "bank",
    "collected",
    ("bank.features",),
    "rows of image features for the other sites' contrast, each the mean of one patient or more",
    personal=True,
    max_rows=MOST_ROWS,
    width=WIDEST,
    narrower=True,
    unit_rows=True,
)
AVERAGED = (ADAPTER.name, BRANCH.name, PARAMETERS.name)

LOSS_PARTS = Field("loss_parts", "tree", "parts of the training loss of both adapters, means", length=2_000)
BANK_USE = Field(
    "bank", "tree", "rows sent and received, patients a row, and how well the rows give away who is in them", length=500
)
CONTRACT = Contract(
    method="fedmrg",
    title="FedMRG: dual adapters, contrast of images, diagnosis prompts",
    groups=(ADAPTER, BRANCH, PARAMETERS, BANK),
    tasks=(
        replace(handshake, down=AVERAGED, up=AVERAGED),
        replace(train, down=(*AVERAGED, BANK.name), up=(*AVERAGED, BANK.name)).with_fields(LOSS_PARTS, BANK_USE),
        replace(close_round, down=AVERAGED),
    ),
    stays="patients, images, reports, the labels of reports, the specialised adapter and its optimiser",
)
