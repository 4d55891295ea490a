"""`octavo serve`: the OpenAI-compatible server."""

import sys

from octavo.config import EngineConfig
from octavo.flags import ENGINE, Family, with_options
from octavo.server.listening import check_certificate
from octavo.server.options import SERVER_ELSEWHERE, ServerOptions, server_options
from octavo.server.supervisor import supervise
from octavo.text.chat import read_template

SERVER = Family(ServerOptions.from_keywords, server_options(), SERVER_ELSEWHERE)


@with_options(positional="model", engine=ENGINE, server=SERVER)
def serve(engine: EngineConfig, server: ServerOptions) -> None:
    """Serve a model with the API that OpenAI's clients speak.

    The port answers at once: /livez says 200 while the process lives, /health 503 until requests run.
    """
    if server.chat_template is not None:
        read_template(server.chat_template)  # a faulty one is told before anything is started
    check_certificate(server)
    sys.exit(supervise(engine, server))
