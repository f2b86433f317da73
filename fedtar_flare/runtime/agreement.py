"""Which sites can work together: those with the same model, adapter and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.protocol.exchange import ExchangeSchema, disagreement_table
from fedtar_flare.protocol.messages import Reply, compatible
from fedtar_flare.runtime.tasking import Answers
from fedtar_flare.version import __version__

Row = Mapping[str, Any]
"""What is compared, by name."""


def agree(answers: Answers, min_sites: int, like: Row | None = None) -> Row:
    """Keep the sites that agree; the others move from ``replies`` to ``refused`` and the run goes on without them.

    Without ``like`` the largest group of sites that agree among themselves and run the server's version stays; of equal
    groups, the one with the first site by name. With ``like``, what a run has agreed on, each site must match it.
    Returns what those that stay share.

    Raises:
        FedTARError: fewer than ``min_sites`` agree; with a table of who differs in what.
    """
    rows = {site: _row(reply) for site, reply in sorted(answers.replies.items())}
    if like is None:
        usable = [site for site in rows if rows[site]["fedtar_flare"] == __version__] or list(rows)
        groups = [[other for other in usable if rows[other] == rows[site]] for site in usable]
        kept = max(groups, key=len, default=[])
        row: Row = rows[kept[0]] if kept else {}
    else:
        row = like
        kept = [site for site in rows if rows[site] == row]
    if len(kept) < min_sites:
        table = disagreement_table({**rows, "(server)": {**next(iter(rows.values()), {}), "fedtar_flare": __version__}})
        raise FedTARError(
            "too few sites agree on what is exchanged; install the same fedtar_flare everywhere and give all sites "
            f"the same model and adapter settings. Who differs in what:\n{table}"
        )
    for site in sorted(set(rows) - set(kept)):
        differing = sorted(key for key in {*row, *rows[site]} if row.get(key) != rows[site].get(key))
        answers.refused[site] = f"it differs from the other sites in: {', '.join(differing[:5])}"
        del answers.replies[site]
    return row


def _row(reply: Reply) -> dict[str, Any]:
    schema = ExchangeSchema.from_dict(reply.payload["schema"])
    version = (reply.payload.get("versions") or {}).get("fedtar_flare")
    return {
        "fedtar_flare": __version__ if compatible(version) else str(version),
        "settings": reply.payload.get("settings"),
        "base weights": (reply.payload.get("model") or {}).get("fingerprint"),
        "updates in": schema.dtype_up,
        "tensors": len(schema.shapes),
        "parameters": schema.parameters,
        **{f"tensor {name}": list(shape) for name, shape in schema.shapes},
    }
