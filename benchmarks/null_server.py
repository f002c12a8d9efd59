"""The real service over an engine without a model, for `benchmarks.scheduler`: what streaming alone costs.

python -m benchmarks.null_server PORT MAX_STREAMS NEW_TOKENS [PROFILE]
"""

import cProfile
import signal
import sys
from contextlib import suppress

import uvicorn

from app.factory import create_app
from app.settings import Settings
from benchmarks.scheduler import null_engine


def main() -> None:
    port, num_streams, num_tokens = map(int, sys.argv[1:4])
    app = create_app(Settings(log_level="warning"), engine=null_engine(num_streams, num_tokens))
    if len(sys.argv) == 4:
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises the signal again when it has ended
    with cProfile.Profile() as profiler, suppress(SystemExit):
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
    profiler.dump_stats(sys.argv[4])


if __name__ == "__main__":
    main()
