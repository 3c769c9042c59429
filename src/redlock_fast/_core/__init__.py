"""The compiled core: a sans-I/O machine, and what moves its bytes.

The machine (`wire`, `op`, `link`, `fleet`) turns bytes into replies, replies into votes and votes
into verdicts. It makes no system call and reads no clock: bytes and the time are handed to it, and
it says what to send and until when to wait. `io` sends, receives and waits, the only code that runs
without the GIL; it decides nothing. `pump` stands between the two and runs rounds for threads.
Private: no name here is public API.
"""
