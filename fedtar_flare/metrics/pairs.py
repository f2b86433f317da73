"""What every comparison of two lists asks for."""

from collections.abc import Sized

from fedtar_flare.errors import DataError


def require_pairs(references: Sized, hypotheses: Sized) -> None:
    """Raise DataError (``unequal-lengths``, ``no-reports``) unless each of some reports has its reference."""
    if len(references) != len(hypotheses):
        raise DataError(
            f"{len(references)} reference(s) but {len(hypotheses)} generated report(s): they must go in pairs",
            reason="unequal-lengths",
        )
    if not len(references):
        raise DataError("there is no report to score", reason="no-reports")
