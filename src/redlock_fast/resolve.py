"""What must be known before a connection is opened, and may take long to learn.

Given a master's settings, `ask` returns an `Answer` at once. A daemon thread fills it in: with the
addresses of a host name, with the credentials of a provider (which is code of the user's). Driven
by both drivers, once per connection; who asked is woken, and reads the answer when it gets to it.

Never: waits, keeps an answer for the next connection (that is the system's resolver's business),
holds the process up when it ends, has more than `MAX_THREADS` threads.

Compiled, so that `ask` is not interrupted half way: neither by a signal handler, nor by a thread.
"""

from __future__ import annotations

import os
import socket
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from typing import Any

from redlock_fast.options import MasterOptions, Secret

__all__ = ["Answer", "ask"]

# Threads of a process; a look-up that hangs keeps one for as long as the system's resolver tries.
MAX_THREADS = 8
# Addresses of one name that are tried.
MAX_PLACES = 8

_waiting: deque[tuple[Answer, MasterOptions, Callable[[], Any]]] = deque()
_running = 0


class Answer:
    """What was found out.

    Attributes:
        done: whether the rest is final.
        places: (family, sockaddr) pairs to connect to, in the resolver's order.
        username, password: what to say to AUTH; None both without a credential provider.
        outcome, cause: why there is no answer, as an error report has it; empty when there is one.
    """

    def __init__(self) -> None:
        self.done = False
        self.places: tuple[Any, ...] = ()
        self.username: str | None = None
        self.password: Secret | None = None
        self.outcome = ""
        self.cause = ""


def ask(options: MasterOptions, wake: Callable[[], Any]) -> Answer:
    """Have a master's name looked up, and its credentials asked for; returns at once.

    Parameters:
        wake: a weak reference to whoever is to be told; its `wake` method is called, in another
            thread, when the answer is `done`.
    """
    global _running
    answer = Answer()
    _waiting.append((answer, options, wake))
    if _running < MAX_THREADS:
        try:
            start_new_thread(_work, ())
        except RuntimeError as error:
            if not _running:  # nobody else will take it
                _waiting.pop()
                answer.outcome, answer.cause = "unresolved", f"cannot be looked up: {error}"
                answer.done = True
        else:
            _running += 1
    return answer


def _work() -> None:
    """Answer what was asked until there is nothing left."""
    global _running
    while True:
        if not _waiting:
            _running -= 1
            return
        answer, options, wake = _waiting.popleft()
        try:
            _find_out(answer, options)
        finally:
            answer.done = True
            asker = wake()
            if asker is not None:
                asker.wake()
            del answer, options, wake, asker


def _find_out(answer: Answer, options: MasterOptions) -> None:
    answer.places = options.places
    try:
        if options.host is not None:
            answer.places = _places(options.host, options.port)
    except BaseException as error:  # noqa: BLE001 - others put code of theirs there
        answer.outcome = "unresolved"
        answer.cause = f"host name {options.host} cannot be looked up: {_why(error)}"
        return
    if options.credential_provider is None:
        return
    try:
        answer.username, answer.password = _credentials(options.credential_provider)
    except BaseException as error:  # noqa: BLE001 - somebody else's code, in a thread of ours
        # What it says may hold a secret.
        answer.outcome = "CONFIG"
        answer.cause = f"the credential provider failed: {type(error).__name__}"


def _places(host: str, port: int) -> tuple[Any, ...]:
    found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
    places = dict.fromkeys(
        (row[0], row[4]) for row in found if row[0] in (socket.AF_INET, socket.AF_INET6)
    )
    if not places:
        raise OSError(0, "it has no IPv4 or IPv6 address")
    return tuple(places)[:MAX_PLACES]


def _credentials(provider: Any) -> tuple[str | None, Secret]:
    """What redis-py's providers return: (password,) or (user name, password)."""
    given = provider.get_credentials()
    username, password = given if len(given) == 2 else (None, *given)
    if isinstance(password, str):
        password = password.encode()
    if isinstance(username, bytes):
        username = username.decode()
    if username is not None and not isinstance(username, str):
        raise TypeError("the user name is no str")
    return username or None, Secret(password)


def _why(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _after_fork_in_child() -> None:
    global _running
    _running = 0
    _waiting.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
