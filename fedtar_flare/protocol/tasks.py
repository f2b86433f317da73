"""Tasks and tensor groups that most methods share; a method adds its own fields to them.

A round is any number of ``train`` tasks and one ``close_round``. Each task starts a process in FLARE's simulator, so
tasks are few: what can be answered together is asked together.
"""

from fedtar_flare.protocol.contract import LORA_NAMES, WHOLE_PARAMETERS, Group, Task
from fedtar_flare.protocol.fields import SECONDS, Field, loss_field

__all__ = [
    "ADAPTER", "CLOSE_ROUND", "HANDSHAKE", "PARAMETERS", "PRIVACY", "SCORES", "TRAIN", "close_round", "handshake",
    "train",
]  # fmt: skip

HANDSHAKE = "handshake"
TRAIN = "train"
CLOSE_ROUND = "close_round"

ADAPTER = Group("adapter", "averaged", (LORA_NAMES,), "the shared low-rank factors A and B")
PARAMETERS = Group(WHOLE_PARAMETERS, "averaged", (), "parameters of the base model that the run exchanges whole")
"""Which parameters may travel whole is the site's decision: ``extra_names`` of its guard."""

PRIVACY = Field("privacy", "tree", "epsilon, delta and budget of a site's privacy filter", length=1_000, public=True)
SCORES = (
    Field("scores", "tree", "scores of test reports by step, finding and labeler, with the personal part", 40_000),
    Field("scores_generic", "tree", "the same without the personal part", 40_000),
)

handshake = Task(
    HANDSHAKE,
    "read the site's data, agree on the exchange, score the start",
    at="start",
    down=(ADAPTER.name, PARAMETERS.name),
    up=(ADAPTER.name, PARAMETERS.name),
    sends="initial",
    fields=(
        Field("schema", "schema", "names and shapes of the tensors that travel", public=True),
        Field("versions", "words", "of packages", length=20, public=True),
        Field("start", "word", "checksum of the initial weights, which follow from the seed", public=True),
        Field("settings", "word", "digest of the settings that must agree", public=True, required=True),
        Field(
            "counts",
            "tree",
            "visits per split and time step, in multiples of min_cell",
            length=10_000,
            least=0,
            public=True,
            required=True,
        ),
        Field("min_cell", "count", "fewest distinct patients of a reported cell", least=1, most=1_000, public=True),
        Field(
            "rank", "count", "rank of the shared adapter at the site, where it is below the job's", least=1, public=True
        ),
        Field("lora_mean", "word", "which mean of the adapters the job asks for, if not of the factors", public=True),
        Field("skipped_studies", "tree", "studies that could not be read, by reason", length=5_000, least=0),
        Field("adapter_config", "settings", "PEFT's own configuration of the adapter", length=8_000, public=True),
        Field("model", "settings", "sizes and settings of the base model", length=8_000, public=True),
        PRIVACY,
        SECONDS,
        *SCORES,
    ),
)

train = Task(
    TRAIN,
    "train on the site's own visits",
    down=(ADAPTER.name, PARAMETERS.name),
    up=(ADAPTER.name, PARAMETERS.name),
    sends="difference",
    follows=(HANDSHAKE,),
    fields=(
        Field("samples", "count", "visits that were trained on", least=1, public=True, required=True),
        loss_field("train_loss", "mean token loss over the local updates, to about its standard error"),
        Field("updates", "count", "local updates made, in a job with training.seconds", least=1, public=True),
        Field("planned_updates", "count", "training.local_steps, likewise", least=1, public=True),
        Field("skipped_updates", "count", "local updates left out because their gradient was not finite"),
        PRIVACY,
        SECONDS,
    ),
)

close_round = Task(
    CLOSE_ROUND,
    "validation loss, and scores when due",
    down=(ADAPTER.name, PARAMETERS.name),
    follows=(HANDSHAKE,),
    fields=(
        loss_field("validation_loss", "mean loss of the validation patients' reports, rounded alike", noisy=True),
        Field("reports", "count", "validation reports", least=1, public=True),
        PRIVACY,
        SECONDS,
        *SCORES,
    ),
)
