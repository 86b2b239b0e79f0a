"""A chat on a pseudo-terminal: an answer, an answer that is interrupted, /stats, /quit.

usage: chat.py COMMAND [ARGUMENTS], the program that chats. Ends with code 0 if it did what it should.
"""
import os
import pty
import re
import select
import sys
import time

# What the line editor writes when it waits for a line: it asks for bracketed paste.
READY = rb"\x1b\[\?2004h"


class Terminal:
    def __init__(self, command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execvp(command[0], command)
        self.seen = b""
        self.at = 0

    def expect(self, pattern, seconds=60):
        """Waits for a pattern behind what was matched last."""
        end = time.monotonic() + seconds
        while not (match := re.compile(pattern, re.DOTALL).search(self.seen, self.at)):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                raise SystemExit(f"{pattern!r} did not come; seen: {self.seen[self.at:]!r}")
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                data = b""
            if not data:
                raise SystemExit(f"the program ended before {pattern!r}; seen: {self.seen[self.at:]!r}")
            self.seen += data
        start, self.at = self.at, match.end()
        return self.seen[start:self.at].decode()

    def type(self, text):
        os.write(self.fd, text.encode())

    def code(self):
        """The program's exit code."""
        while True:
            try:
                if not os.read(self.fd, 4096):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


terminal = Terminal(sys.argv[1:])
terminal.expect(rb"/help lists commands")
terminal.expect(READY)

terminal.type("Repeat after me: the quick brown fox\r")
terminal.expect(rb"Repeat after me: the quick brown fox.*\n")
answer = terminal.expect(READY)
assert re.search(r"\nthe quick brown fox\r?\n", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", answer)), repr(answer)

terminal.type("Tell me a short story about a fox.\r")
terminal.expect(rb"story about a fox\..*\n")
terminal.expect(rb"[a-z]{3} [a-z]")
terminal.type("\x03")
terminal.expect(rb"\(stopped\)", 20)
terminal.expect(READY)

# The conversation goes on after an interruption.
terminal.type("/stats\r")
terminal.expect(rb"new tokens")
terminal.expect(READY)
terminal.type("What is 417 + 286?\r")
terminal.expect(rb"\n.*417 \+ 286 = [0-9]+")
terminal.expect(READY)
terminal.type("/quit\r")
code = terminal.code()
assert code == 0, f"exit code {code}"
