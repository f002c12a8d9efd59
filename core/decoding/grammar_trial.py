"""Compiling a grammar, here and, for trial, in a process of its own with limits on time, memory and stack.

Some grammars of a few hundred bytes take llguidance hours, some long ones more stack than a thread has, and nothing
inside a process can stop either. So the server compiles here only what a child process has compiled before, within the
limits; a child that passed them is dead, and that is the answer. This file is also the child's program, so it imports
nothing of ours.
"""

import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILE_S = 2.0  # of the processor's time, so that a busy machine refuses nothing else
MAX_COMPILE_BYTES = 2**30  # of address space
MAX_COMPILE_STACK_BYTES = 2**22  # half of what a thread of the server has
# A row may hold as many items as a schema of the size that we take has optional properties. Memory of a lexer state is
# 1 to 2 kB.
MAX_ITEMS_IN_ROW = 20_000
MAX_LEXER_STATES = 50_000

# Tokenization is the model's affair: where only one text can follow, llguidance would allow the one token with which
# its tokenizer begins that text, and the mask would no longer be a matter of the grammar alone.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

# Tokens as bytes, ids of the special ones, ids of ends.
TokenTable = tuple[list[bytes], list[int], list[int]]

_ENDINGS = {
    -signal.SIGPROF: f"it takes more than {MAX_COMPILE_S:g} s to compile",
    -signal.SIGSEGV: "it refers too deeply from one rule to the next",
    -signal.SIGABRT: f"it takes more than {MAX_COMPILE_BYTES:,} bytes to compile",
}


class _Tokens:
    """A table in the shape that llguidance takes."""

    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens, self.special_token_ids, ends = table
        self.eos_token_id = ends[0]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text; asked only where tokens are forced, which `_OPTIONS` rules out."""
        return []


def make_bridge(table: TokenTable) -> "LLTokenizer":
    """The tokenizer as llguidance sees it."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Tokens(table)), eos_token=table[2])


def compile_grammar(bridge: "LLTokenizer", lark: str) -> tuple["LLMatcher", str]:
    """The grammar at its beginning, and what is wrong with it, '' for nothing. It must allow something there."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ITEMS_IN_ROW, max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(bridge, lark + _OPTIONS, log_level=0, limits=limits)
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    return matcher, matcher.get_error()


class Trial:
    """A child process that compiles; it ends with this object. Not for several threads."""

    def __init__(self, table: TokenTable) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what the child has to say of its death is no message for our log
            )
        self._end = weakref.finalize(self, _end, self._connection, self.process)
        with suppress(OSError):  # a child that died already is heard of when it is asked
            self._connection.send(table)

    @property
    def is_over(self) -> bool:
        """True when the child has died, or has been ended."""
        return not self._end.alive

    def error_of(self, lark: str) -> str:
        """What is wrong with a grammar, '' for nothing."""
        try:
            self._connection.send(lark)
            return str(self._connection.recv())
        except (EOFError, OSError):
            self._end()
            code = self.process.returncode
            return _ENDINGS.get(code, f"it cannot be compiled (exit code {code})")


def _end(connection: Connection, process: "subprocess.Popen[bytes]") -> None:
    connection.close()  # an idle child ends by that, and a busy one when its time is up
    process.wait()


def _serve(connection: Connection) -> None:
    """The child: a table comes first, then grammars; each is answered by what is wrong with it."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_COMPILE_BYTES, MAX_COMPILE_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_COMPILE_STACK_BYTES, MAX_COMPILE_STACK_BYTES))
    bridge = make_bridge(connection.recv())
    while True:
        lark = connection.recv()
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)  # whose signal, not handled, ends us
        _, error = compile_grammar(bridge, lark)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(error)


if __name__ == "__main__":
    try:
        _serve(Connection(int(sys.argv[1])))
    except EOFError:  # nobody will ask any more
        sys.exit(0)
