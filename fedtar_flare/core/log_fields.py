"""Which task a line of ``log.json`` belongs to: a kit's ``log_config.json`` names this filter, which FLARE makes."""

import logging

POSITION: dict[str, object] = dict.fromkeys(("run", "round", "step", "task"))
"""Of this process: the task that it does, or has done last; None before the first and outside of jobs."""


class Position(logging.Filter):
    """Gives each log record the fields of :data:`POSITION`; all records pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__.update(POSITION)
        return True
