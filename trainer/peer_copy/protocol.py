"""Protocol between a store of checkpoints in memory and its clients: names of files, and signatures.

[Note: signatures] All who take part hold the run's token, which never travels. A connection begins with a greeting:
each side draws a nonce, and the store proves by an HMAC over both that it holds the token, so nothing is sent to a
stranger who has got the port. Every further request of the connection is signed by an HMAC over the nonces, its number
on the connection, its method, its target, its range and the length of its body: a request that was overheard is good
on no other connection, and not twice on its own. Bodies are not encrypted, and covered by a CRC-32 alone: the network
between the machines of a run is taken to be the run's.
"""

from __future__ import annotations

import hashlib
import hmac
import re

HELLO = "/v1/hello"
FILES = "/v1/files/"
LIST = "/v1/list"
CHECK = "/v1/check/"
LIMIT = "/v1/limit"
STORE = "/v1/store"

NONCE, PROOF, SIGNATURE, FREE = "X-Nonce", "X-Proof", "X-Signature", "X-Free-Bytes"

MAX_PART_BYTES = 64 << 20
"""Of one body; a file is sent in as many as it takes."""
_NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MAX_DEPTH = 4


def is_name(name: str) -> bool:
    """Whether a store may have a file of this name: a few plain components, none of which leads anywhere else."""
    parts = name.split("/")
    return len(parts) <= _MAX_DEPTH and all(_NAME.fullmatch(part) for part in parts)


def proof_of(token: str, client_nonce: str, server_nonce: str) -> str:
    """Return what shows that a store holds the token."""
    return _hmac(token, "store", client_nonce, server_nonce)


def signature_of(token: str, nonces: str, number: int, method: str, target: str, span: str, length: int) -> str:
    """Return the signature of a request; see [Note: signatures].

    Args:
        nonces: of the client and of the store, as one text.
        number: of the request on its connection, counted from 1.
        span: content of its Range header.
        length: of its body, in bytes.
    """
    return _hmac(token, "request", nonces, str(number), method, target, span, str(length))


def _hmac(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()
