"""What FedKEI exchanges: the common start once, then in each task centres down, and a gradient and a module up.

Centres go down stacked along a leading axis K, of which adapters and heads each have their own. PROBE is answered in
that shape, ADAPT with one module, without the axis, as its difference from the common start.

A module is what one hospital learnt of one disease, and a cluster of one hospital sends it to all others. And G is
nearly the full gradient of the training split. Both are declared as modules, which privacy filters refuse.
"""

from dataclasses import replace

from fedtar_flare.protocol.contract import (
    HANDSHAKE,
    LORA_NAMES,
    PRIVACY,
    SCORES,
    SECONDS,
    Contract,
    Field,
    Group,
    Task,
    handshake,
    loss_field,
)

PROBE, ADAPT = "probe", "adapt"

IMPORTANCE, PULL = "importance.", "pull."
"""Prefixes of tensor names on the wire: the tensor's Fisher information, and that times the tensor."""

_ADAPTER = (LORA_NAMES, "base_model.model.*.ia3_l")
_HEAD = ("head.weight", "head.bias")

ADAPTER = Group("adapter", "averaged", _ADAPTER, "the common start: low-rank factors or scales, by the job's seed")
HEAD = Group("head", "averaged", _HEAD, "the common start of the binary head, by the job's seed")
ADAPTERS = Group("adapters", "pooled", _ADAPTER, "adapters that hospitals learnt of a disease, and gradients in them")
HEADS = Group("heads", "pooled", _HEAD, "binary heads that hospitals learnt of a disease, and gradients in them")

_IMPORTANCE, _PULL = (tuple(f"{prefix}{name}" for name in (*_ADAPTER, *_HEAD)) for prefix in (IMPORTANCE, PULL))
IMPORTANCES = Group("importances", "pooled", _IMPORTANCE, "plan fedcurv: a module's Fisher information")
PULLS = Group("pulls", "pooled", _PULL, "plan fedcurv: all modules' sum, each weighted by its Fisher information")

_START, _MODULES = (ADAPTER.name, HEAD.name), (ADAPTERS.name, HEADS.name)
_NOT_IN_HANDSHAKE = {"adapter_config", *(field.name for field in SCORES)}
SAMPLES = Field("samples", "count", "images of the task that were learnt from", least=1, public=True, required=True)

probe = Task(
    PROBE,
    "the gradient of the training loss in the centres, after an inner epoch of alpha",
    down=_MODULES,
    up=_MODULES,
    sends="difference",
    follows=(HANDSHAKE,),
    fields=(SAMPLES, PRIVACY, SECONDS),
)

adapt = Task(
    ADAPT,
    "learn alpha, tune a module on the site's own images of the task, and score it",
    down=(*_MODULES, IMPORTANCES.name, PULLS.name),
    up=(*_MODULES, IMPORTANCES.name),
    sends="difference",
    follows=(HANDSHAKE,),
    fields=(
        SAMPLES,
        loss_field("train_loss", "mean cross-entropy over the epochs, to about its standard error"),
        Field("skipped_updates", "count", "updates left out because their gradient was not finite"),
        Field("counts", "tree", "the task's place in the job's list; negatives and positives per split", length=1_000),
        Field("scores", "tree", "AUC of test images by epoch, of guessing membership; losses, seconds", length=20_000),
        PRIVACY,
        SECONDS,
    ),
)

CONTRACT = Contract(
    method="fedkei",
    title="FedKEI: informed starts for new diseases",
    groups=(ADAPTER, HEAD, ADAPTERS, HEADS, IMPORTANCES, PULLS),
    tasks=(
        replace(
            handshake,
            about="read the site's data, agree on the exchange and the common start",
            down=_START,
            up=_START,
            fields=tuple(field for field in handshake.fields if field.name not in _NOT_IN_HANDSHAKE),
        ),
        probe,
        adapt,
    ),
    stays="patients, images, labels, the weights alpha of a site's own mixture, scores of single images",
)
