"""Which requests of the server a site answers.

At a site FLARE checks an administrator's rights by what the server writes into the request, so the site's policy binds
an honest server alone; any other could read every text file of the site's account with FLARE's shell, switch the site's
log off, or have a folder of the kit replaced by a "job" of that name. Here these are refused whoever sends them.
"""

import logging

from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import InfoCollectorTopic, RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.admin import RequestProcessor

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

logger = logging.getLogger(__name__)


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
        else:
            return self.processor.process(req, app_ctx)
        user = str(req.get_header(RequestHeader.USER_NAME, ""))[:100]
        logger.warning("a request of the server was refused (%s), in the name of %r", reason, user)
        return error_reply(f"refused by the site: {reason}")
