"""The names of all options: which are honoured, which are accepted, which are refused.

All parameters of `Redis` and `Valkey`, of their connection classes and pools, sync and asyncio, in
redis-py 5.0 to 8.1 and valkey-py 6.0 to 6.2, are here; whatever is not is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from redlock_fast._settings.values import Refused

__all__ = ["HONOURED", "KNOWN", "NO_EFFECT", "TLS_OPTIONS", "UNSUPPORTED", "check_names"]

# What a user is told who wrote a secret into a URL as it is.
ESCAPE = "in a user name or password, '/', '?', '#', '@' and '%' must be percent-encoded"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A `path` of a URL or client becomes `unix_socket_path`.
HONOURED = _names(
    "host port unix_socket_path db username password credential_provider client_name ssl"
)
# With TLS they are honoured or refused by tls.py; without, they have no effect (`Redis.__init__`).
TLS_OPTIONS = _names(
    """ssl_ca_certs ssl_ca_data ssl_ca_path ssl_cert_reqs ssl_certfile ssl_check_hostname
    ssl_ciphers ssl_exclude_verify_flags ssl_include_verify_flags ssl_keyfile ssl_min_version
    ssl_ocsp_context ssl_ocsp_expected_cert ssl_password ssl_validate_ocsp
    ssl_validate_ocsp_stapled"""
)
# Refused unless None.
UNSUPPORTED = {
    **{
        name: f"{name} is not supported: it would replace the handshake"
        for name in ("redis_connect_func", "valkey_connect_func")
    },
    "connection_pool": "connection_pool is not supported: pass redis.Redis(connection_pool=...)",
}
# Accepted without effect: pool, retry, timeout, protocol, decoding, caching and identification.
NO_EFFECT = _names(
    """auto_close_connection_pool cache cache_allow_list cache_config cache_deny_list cache_enabled
    cache_factory cache_max_size cache_policy cache_ttl charset client_cache command_packer
    decode_responses driver_info encoder_class encoding encoding_errors errors event_dispatcher
    health_check_interval himport_registry legacy_responses lib_name lib_version
    maint_notifications_config maint_notifications_pool_handler maintenance_notification_hash
    maintenance_state max_connections orig_host_address orig_socket_connect_timeout
    orig_socket_timeout oss_cluster_maint_notifications_handler parser_class protocol queue_class
    retry retry_on_error retry_on_timeout single_connection_client socket_connect_timeout
    socket_keepalive socket_keepalive_options socket_read_size socket_timeout socket_type
    timeout"""
)
KNOWN = HONOURED.union(TLS_OPTIONS, UNSUPPORTED, NO_EFFECT)


def check_names(names: Iterable[object], known: frozenset[str]) -> None:
    """Refuse names that are not in `known`, naming them where that is safe."""
    unknown = [name for name in names if name not in known]
    # Only what looks like a name is shown: the rest may be a piece of a mangled URL.
    shown = [repr(name) for name in unknown if re.fullmatch("[A-Za-z0-9_]{1,64}", str(name))]
    if shown:
        raise Refused(f"unknown option {', '.join(shown)}")
    if unknown:
        raise Refused(f"unknown option, with a name that is not shown; {ESCAPE}")
