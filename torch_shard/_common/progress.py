"""A line about what takes long, for who would wait in front of a silent terminal."""

import contextlib
import logging
import threading
from collections.abc import Generator

SLOW_S = 10.0
"""After so many seconds a line says what is under way; small programs are compiled by then."""

_PACKAGE = logging.getLogger(__name__.partition(".")[0])


@contextlib.contextmanager
def telling_when_slow(logger: logging.Logger, message: str, *args: object) -> Generator[None, None, None]:
    """Say what is under way if it is not over after some seconds: at level INFO, which is heard without any set-up.

    It is no warning, and Python shows nothing less where logging is not set up. So the line then goes to stderr by
    `logging.lastResort`, as warnings do. Whoever gives the logger `torch_shard` a level decides for himself.

    Args:
        logger: Of the module in which it is under way.
        message: With places for `args`, as loggers take it.
        *args: For the message.
    """

    def tell() -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info(message, *args)
        elif _PACKAGE.level == logging.NOTSET and logging.lastResort is not None:
            record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, args, None)
            logging.lastResort.handle(record)

    timer = threading.Timer(SLOW_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
