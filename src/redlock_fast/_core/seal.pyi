from redlock_fast.tls import TlsOptions

class Seal:
    open: bool
    extra: int
    def __new__(cls, options: TlsOptions) -> Seal: ...
