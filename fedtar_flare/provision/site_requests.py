"""Which requests of the server a site answers.

At a site FLARE checks an administrator's rights by what the server writes into the request, so the site's policy binds
an honest server alone; any other could read every text file of the site's account with FLARE's shell, switch the site's
log off, or have a folder of the kit replaced by a "job" of that name. Here these are refused whoever sends them.
"""

import io
import logging
from zipfile import ZipFile

from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import InfoCollectorTopic, RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.admin import RequestProcessor

from fedtar_flare.core.files import MOST_BYTES
from fedtar_flare.site.context import JOB_ID

ANSWERED = frozenset(
    {
        TrainingTopic.ABORT,
        TrainingTopic.ABORT_TASK,
        TrainingTopic.CANCEL_RESOURCE,
        TrainingTopic.CHECK_RESOURCE,
        TrainingTopic.CHECK_STATUS,
        TrainingTopic.DELETE_RUN,
        TrainingTopic.DEPLOY,
        TrainingTopic.GET_SCOPES,
        TrainingTopic.NOTIFY_JOB_STATUS,
        TrainingTopic.RESTART,
        TrainingTopic.SHUTDOWN,
        TrainingTopic.START_JOB,
        InfoCollectorTopic.SHOW_STATS,
        SysCommandTopic.REPORT_ENV,
        SysCommandTopic.REPORT_RESOURCES,
        SysCommandTopic.REPORT_VERSION,
        SysCommandTopic.SYS_INFO,
    }
)
"""Not: the shell, error texts of a running job, levels of the logs, and whatever a later FLARE adds."""

MOST_FILES = 10_000  # most files and folders of a job's app

logger = logging.getLogger(__name__)


def unfit_app(packed: object) -> str:
    """Say why a job's app is not unpacked, which FLARE does before it looks at its signature; empty if it is."""
    try:
        if not isinstance(packed, bytes) or len(packed) > MOST_BYTES:
            return "the app is no archive, or too large"
        if packed.count(b"PK\x01\x02") > 2 * MOST_FILES:  # each entry that zipfile reads takes 500 bytes of memory
            return "the app has too many files"
        with ZipFile(io.BytesIO(packed)) as archive:
            sizes = [member.file_size for member in archive.infolist()]
    except Exception as error:  # zipfile raises whatever the broken bytes lead to
        return f"the app cannot be unpacked ({type(error).__name__})"
    return "" if len(sizes) <= MOST_FILES and sum(sizes) <= MOST_BYTES else "the app would fill the disk"


class RequestFilter(RequestProcessor):
    """One of FLARE's processors of requests, behind the site's own check."""

    def __init__(self, processor: RequestProcessor):
        super().__init__()
        self.processor = processor

    def get_topics(self) -> list[str]:
        return list(self.processor.get_topics())

    def process(self, req: Message, app_ctx: object) -> Message:
        job_id = req.get_header(RequestHeader.JOB_ID)
        if req.topic not in ANSWERED:
            reason = f"no site answers '{req.topic}'"
        elif job_id not in (None, "") and not JOB_ID.fullmatch(str(job_id)):
            reason = "this is no job's id"
        elif not (req.topic == TrainingTopic.DEPLOY and (reason := unfit_app(req.body))):
            return self.processor.process(req, app_ctx)
        user = str(req.get_header(RequestHeader.USER_NAME, ""))[:100]
        logger.warning("a request of the server was refused (%s), in the name of %r", reason, user)
        return error_reply(f"refused by the site: {reason}")
